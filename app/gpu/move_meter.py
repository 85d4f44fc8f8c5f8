"""How fast KV moves on this machine, and how much of it has moved."""

from __future__ import annotations

from collections.abc import Mapping

from app.gpu.kv_moves import Move, Moved, MoveKind
from app.memory_map import MoveTotals

FIRST_GUESS_BYTES_PER_S = {MoveKind.OUT: 4e9, MoveKind.IN: 4e9, MoveKind.TO_DISK: 5e8, MoveKind.FROM_DISK: 5e8}
"""Bandwidths until a move has been measured: what a slow bus and a slow solid-state disk do."""


class MoveMeter:
    """Totals per kind of move, and estimates from them."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._totals = {kind: MoveTotals() for kind in FIRST_GUESS_BYTES_PER_S}

    def add(self, move: Move, report: Moved) -> None:
        """Count a move that has ended. Early ones say nothing of the link: they get what time the model leaves."""
        if move.kind in self._totals and not move.early and report.error is None:
            before = self._totals[move.kind]
            moved = max(len(move.source), len(move.target)) * self._block_bytes
            self._totals[move.kind] = MoveTotals(
                before.moves + 1, before.bytes + moved, before.seconds + report.seconds
            )

    def seconds(self, kind: MoveKind, blocks: int) -> float:
        """How long a move of so many blocks takes, by what has been seen."""
        seen = self._totals[kind]
        speed = seen.bytes / seen.seconds if seen.seconds else FIRST_GUESS_BYTES_PER_S[kind]
        return blocks * self._block_bytes / speed

    def totals(self) -> Mapping[str, MoveTotals]:
        """By the name of the kind."""
        return {kind.value: total for kind, total in self._totals.items()}
