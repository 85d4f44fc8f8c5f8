"""The moves in flight, and the measured speed of past ones."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from app.domain.memory_map import MoveTotals
from app.gpu.state.blocks import BlockId, BlockPool
from app.gpu.state.moves import Move, Moved, MoveKind
from app.gpu.state.sequence import TokenSequence


class MoveLedger:
    """Numbers moves, and holds a reference to the blocks of each until it ends. `orders` are for the mover."""

    def __init__(self, device: BlockPool, host: BlockPool) -> None:
        self.orders: list[Move] = []
        self.in_flight: dict[int, Move] = {}
        self._device = device
        self._host = host
        self._sequences: dict[int, TokenSequence] = {}
        self._last = 0

    @property
    def version(self) -> tuple[int, int]:
        """Another one after each move that begins or ends."""
        return self._last, len(self.in_flight)

    @property
    def moving(self) -> AbstractSet[TokenSequence]:
        """Sequences with a move under way."""
        return set(self._sequences.values())

    def order(self, sequence: TokenSequence, kind: MoveKind, **fields: Any) -> Move:
        """Begin a move; it takes over one reference to each of its blocks."""
        self._last += 1
        move = Move(self._last, kind, sequence.session, **fields)
        self.orders.append(move)
        self.in_flight[move.number] = move
        self._sequences[move.number] = sequence
        return move

    def find(self, number: int) -> tuple[Move, TokenSequence]:
        """A move under way, and the sequence that it was ordered for."""
        return self.in_flight[number], self._sequences[number]

    def close(self, move: Move) -> None:
        """Release the blocks of a move that has ended; its sequence already shares those that it wants."""
        del self.in_flight[move.number], self._sequences[move.number]
        for pool, blocks in self._held_by(move):
            pool.release(blocks)

    def held(self, pool: BlockPool) -> list[tuple[BlockId, ...]]:
        """Blocks of `pool` that moves under way hold, for `check_integrity`."""
        return [blocks for move in self.in_flight.values() for owner, blocks in self._held_by(move) if owner is pool]

    def _held_by(self, move: Move) -> list[tuple[BlockPool, tuple[BlockId, ...]]]:
        device, host = self._device, self._host
        match move.kind:
            case MoveKind.OUT:
                return [(device, move.source), (host, move.target)]
            case MoveKind.IN:
                return [(host, move.source), (device, move.blocks)]
            case _:
                return [(host, move.source), (host, move.target)]


FIRST_GUESS_BYTES_PER_S = {MoveKind.OUT: 4e9, MoveKind.IN: 4e9, MoveKind.TO_DISK: 5e8, MoveKind.FROM_DISK: 5e8}
"""Bandwidths until a move has been measured: those of a slow bus and of a slow solid-state disk."""


class MoveMeter:
    """Totals per kind of move, and estimates from them."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._totals = {kind: MoveTotals() for kind in FIRST_GUESS_BYTES_PER_S}

    def add(self, move: Move, report: Moved) -> None:
        """Count a move that has ended. Early copies do not count: they run only in the time that the model leaves."""
        if move.kind in self._totals and not move.early and report.error is None:
            before = self._totals[move.kind]
            moved = max(len(move.source), len(move.target)) * self._block_bytes - move.bytes_left_out
            self._totals[move.kind] = MoveTotals(
                before.moves + 1, before.bytes + moved, before.seconds + report.seconds
            )

    def seconds(self, kind: MoveKind, blocks: int) -> float:
        """Estimated seconds of a move of so many blocks."""
        seen = self._totals[kind]
        speed = seen.bytes / seen.seconds if seen.seconds else FIRST_GUESS_BYTES_PER_S[kind]
        return blocks * self._block_bytes / speed

    def totals(self) -> Mapping[str, MoveTotals]:
        """By the name of the kind."""
        return {kind.value: total for kind, total in self._totals.items()}
