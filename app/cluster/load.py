"""How busy a replica is, as it tells the others."""

from __future__ import annotations

import msgspec

from app.domain.memory_map import MemoryMap


class Load(msgspec.Struct, frozen=True):
    """`kv_free`: the part of the device's KV that no session holds, 0 to 1. `turns`: those that run or wait.
    `host_free`: the part of host memory for KV that no session holds.
    """

    kv_free: float
    turns: int
    host_free: float = 0.0

    @classmethod
    def measured(cls, memory: MemoryMap) -> Load:
        """That of an engine with such memory. Without a host tier nothing is free there."""
        free = 1 - memory.device.owned_bytes / max(1, memory.device.total_bytes)
        host = memory.host
        host_free = 1 - host.owned_bytes / host.total_bytes if host.total_bytes else 0.0
        return cls(round(free, 4), memory.running + memory.waiting, round(host_free, 4))
