"""The moves under way: each holds a reference to its blocks from the order to the end."""

from __future__ import annotations

import itertools
from collections.abc import Set as AbstractSet
from typing import Any

from app.gpu.kv_blocks import BlockId, BlockPool
from app.gpu.kv_moves import Move, MoveKind
from app.gpu.sequence import Sequence


class MoveLedger:
    """Numbers moves and keeps their blocks alive. `orders` are for the mover, in this order."""

    def __init__(self, device: BlockPool, host: BlockPool) -> None:
        self.orders: list[Move] = []
        self.in_flight: dict[int, Move] = {}
        self._device = device
        self._host = host
        self._sequences: dict[int, Sequence] = {}
        self._numbers = itertools.count(1)

    @property
    def moving(self) -> AbstractSet[Sequence]:
        """Sequences with a move under way."""
        return set(self._sequences.values())

    def order(self, sequence: Sequence, kind: MoveKind, **fields: Any) -> Move:
        """Begin a move; it takes over one reference to each of its blocks."""
        move = Move(next(self._numbers), kind, sequence.session, **fields)
        self.orders.append(move)
        self.in_flight[move.number] = move
        self._sequences[move.number] = sequence
        return move

    def find(self, number: int) -> tuple[Move, Sequence]:
        """A move under way, and the sequence that it was ordered for."""
        return self.in_flight[number], self._sequences[number]

    def close(self, move: Move) -> None:
        """The move has ended, and what it brought has been shared: let go of its blocks."""
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
