"""Moves between real pools beside a plain copy of the same bytes, in this process."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from app.domain.values import SessionId
from app.gpu.device.streams import PASSED, CpuStreams
from app.gpu.kv.mover import KVMover
from app.gpu.kv.pools import HostPool, KVPool
from app.gpu.models.base import LayerStack
from app.gpu.state.kv_header import KVIdentity, KVLayout
from app.gpu.state.layer_state import attention_state
from app.gpu.state.moves import Move, MoveKind

POOL_SESSIONS = 4
"""So many sessions fit in each pool: together they are larger than the caches, and ids can be far apart."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """`rounds` between the same buffers, after which new ones are allocated: how fast memory is depends on where the
    machine has it.
    """

    allocations: int
    rounds: int


@dataclass(frozen=True, slots=True)
class CopyRound:
    """Seconds that each copy of one session's KV took: a plain one, and moves of two kinds of blocks."""

    memcpy: float
    out_neighbouring: float
    out_scattered: float
    in_neighbouring: float
    in_scattered: float


@dataclass(frozen=True, slots=True)
class Copies:
    """first_out_s: seconds of a move out to host memory that nobody has written yet, one for each allocation."""

    rounds: list[CopyRound]
    first_out_s: list[float]


def measure_copies(layout: KVLayout, blocks: int, plan: CopyPlan, seed: int) -> Copies:
    """Copies of sessions of `blocks` blocks, one after the other."""
    chooser = random.Random(seed)
    copies = Copies([], [])
    for _ in range(plan.allocations):
        bench = CopyBench(layout, blocks, chooser)
        copies.first_out_s.append(bench.first_out_s)
        copies.rounds.extend(bench.run(plan.rounds))
    return copies


class CopyBench:
    """Pools for sessions of `blocks` blocks, and as much of NumPy's own memory for the plain copy, all written once."""

    def __init__(self, layout: KVLayout, blocks: int, chooser: random.Random) -> None:
        self._blocks = blocks
        self._random = chooser
        pool_blocks = POOL_SESSIONS * blocks
        device = _device_pool(layout, pool_blocks)
        host = HostPool(device, pool_blocks, CpuStreams())
        self._mover = KVMover(host, KVIdentity("", 1, layout), disk=None)
        self._source, self._target = (np.empty((pool_blocks, layout.block_bytes), np.uint8) for _ in range(2))
        # The machine gives memory when it is first written, which must not be on the clock of the other copies.
        device.data.numpy().fill(1)
        self.first_out_s = self._move(MoveKind.OUT, self._neighbours)
        for memory in (host.data.numpy(), self._source, self._target):
            memory.fill(1)

    def run(self, repeats: int) -> list[CopyRound]:
        """Rounds in which each copy has one turn, in a new order every time, each between other blocks."""
        self._round()  # not kept: what is looked up once has been looked up
        return [self._round() for _ in range(repeats)]

    def _round(self) -> CopyRound:
        copies: dict[str, Callable[[], float]] = {
            "memcpy": self._memcpy,
            "out_neighbouring": lambda: self._move(MoveKind.OUT, self._neighbours),
            "out_scattered": lambda: self._move(MoveKind.OUT, self._scattered),
            "in_neighbouring": lambda: self._move(MoveKind.IN, self._neighbours),
            "in_scattered": lambda: self._move(MoveKind.IN, self._scattered),
        }
        order = self._random.sample(list(copies), len(copies))
        return CopyRound(**{name: copies[name]() for name in order})

    def _memcpy(self) -> float:
        source, target = self._neighbours(), self._neighbours()
        origin, goal = self._source[source[0] : source[-1] + 1], self._target[target[0] : target[-1] + 1]
        begin = time.perf_counter()
        np.copyto(goal, origin)
        return time.perf_counter() - begin

    def _move(self, kind: MoveKind, choose: Callable[[], tuple[int, ...]]) -> float:
        move = Move(1, kind, SessionId("bench"), source=choose(), target=choose())
        begin = time.perf_counter()
        report = self._mover.carry_out(move, PASSED)
        seconds = time.perf_counter() - begin
        if report.error is not None:
            raise RuntimeError(f"the move failed: {report.error}")
        return seconds

    def _neighbours(self) -> tuple[int, ...]:
        first = self._random.randrange((POOL_SESSIONS - 1) * self._blocks + 1)
        return tuple(range(first, first + self._blocks))

    def _scattered(self) -> tuple[int, ...]:
        return tuple(self._random.sample(range(POOL_SESSIONS * self._blocks), self._blocks))


def _device_pool(layout: KVLayout, blocks: int) -> KVPool:
    """A CPU's pool for a model of this shape, without the model."""
    shape = SimpleNamespace(
        num_layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        states=layout.layers * [attention_state(layout.kv_heads, layout.head_dim, None)],
        dtype=getattr(torch, layout.dtype),
        device=torch.device("cpu"),
    )
    return KVPool(cast("LayerStack", shape), blocks, layout.block_size)
