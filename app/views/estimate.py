"""What the server answers about a session that might be."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel

from app.memory_map import MemoryMap
from app.views.memory import bandwidth


class MemoryEstimate(BaseModel):
    """What one session of `tokens` tokens takes, and how many of them the device holds at once.

    `transfer_ms` is how long its KV takes from device to host and back; null where nothing has moved that way yet.
    """

    tokens: int
    blocks: int
    kv_bytes: int
    kv_bytes_per_token: int
    sessions_resident: int
    transfer_ms: dict[Literal["out", "in"], float | None]

    @classmethod
    def of(cls, memory: MemoryMap, tokens: int, bytes_per_s: float | None) -> Self:
        """Whole blocks, as the pool hands them out, moved at `bytes_per_s` or else at the bandwidths measured."""
        blocks = -(-tokens // memory.block_tokens)
        kv_bytes = blocks * memory.block_bytes
        return cls(
            tokens=tokens,
            blocks=blocks,
            kv_bytes=kv_bytes,
            kv_bytes_per_token=memory.block_bytes // memory.block_tokens,
            sessions_resident=memory.kv_total_bytes // kv_bytes,
            transfer_ms={
                "out": _milliseconds(kv_bytes, bytes_per_s or bandwidth(memory.moves["out"])),
                "in": _milliseconds(kv_bytes, bytes_per_s or bandwidth(memory.moves["in"])),
            },
        )


def _milliseconds(moved: int, bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else 1000 * moved / bytes_per_s
