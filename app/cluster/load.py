"""How busy a replica is, as its `/ready` says it to the front door."""

from __future__ import annotations

from dataclasses import dataclass

HEADER = "Djinn-Load"


@dataclass(frozen=True, slots=True)
class Load:
    """`kv_free`: the part of the device's KV that no session holds, 0 to 1. `turns`: those that run or wait."""

    kv_free: float
    turns: int

    @classmethod
    def of(cls, text: str) -> Load | None:
        """What a header says; None if that cannot be read."""
        words = dict(word.partition("=")[::2] for word in text.split())
        try:
            return cls(float(words["kv_free"]), int(words["turns"]))
        except (KeyError, ValueError):
            return None

    def __str__(self) -> str:
        """The header's value."""
        return f"kv_free={self.kv_free:.4f} turns={self.turns}"
