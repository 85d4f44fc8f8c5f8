"""How busy a replica is, as its `/ready` says it to the front door and to other replicas."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain.memory_map import MemoryMap

READY = "/ready"
HEADER = "Djinn-Load"
LEFT = "Djinn-Left"
"""The header of a replica that ends: its sessions have left, so it needs no more requests."""


@dataclass(frozen=True, slots=True)
class Load:
    """`kv_free`: the part of the device's KV that no session holds, 0 to 1. `turns`: those that run or wait.
    `host_free`: the part of host memory for KV that no session holds. `role`: as in the settings.
    """

    kv_free: float
    turns: int
    host_free: float = 0.0
    role: str = "both"

    @classmethod
    def measured(cls, memory: MemoryMap, role: str = "both") -> Load:
        """That of an engine with such memory. Without a host tier nothing is free there."""
        free = 1 - memory.device.owned_bytes / max(1, memory.device.total_bytes)
        host = memory.host
        host_free = 1 - host.owned_bytes / host.total_bytes if host.total_bytes else 0.0
        return cls(free, memory.running + memory.waiting, host_free, role)

    @classmethod
    def of(cls, text: str) -> Load | None:
        """What a header says; None if that cannot be read."""
        words = dict(word.partition("=")[::2] for word in text.split())
        try:
            free, turns = float(words["kv_free"]), int(words["turns"])
            return cls(free, turns, float(words.get("host_free", 0)), words.get("role", "both"))
        except (KeyError, ValueError):
            return None

    def __str__(self) -> str:
        """The header's value."""
        numbers = f"kv_free={self.kv_free:.4f} turns={self.turns} host_free={self.host_free:.4f}"
        return f"{numbers} role={self.role}"
