"""Book-keeping of tiers without an engine: a few blocks, a clock that is set by hand, moves that end when told to."""

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

from app.domain.breakpoints import Pass
from app.domain.values import KVPolicy, Phase, SamplingParams, SessionId, StopRule, Ticket, Tier
from app.gpu.device.streams import CpuStreams
from app.gpu.forward.boundary import HostTensor
from app.gpu.kv.cache import KVCache
from app.gpu.kv.phases import Phases
from app.gpu.kv.placement import Placement
from app.gpu.kv.tiers import KVTiers
from app.gpu.state.blocks import BlockPool
from app.gpu.state.checkpoints import Checkpoint
from app.gpu.state.layer_state import Groups
from app.gpu.state.moves import Move, Moved
from app.gpu.state.sequence import TokenSequence, TurnState
from tests.gpu.breakpoints.breaking_models import vector

BLOCK_SIZE = 4
BLOCK_BYTES = 1000
LAYERS = 4
LENGTH = 4 * BLOCK_SIZE
"""Tokens of the session that is paused."""


def tier_of(sequence: TokenSequence) -> Tier | None:
    """The tier now: mypy takes a property for what it was when last looked at."""
    return sequence.tier


def calls_of(act: Callable[[], object]) -> int:
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


def growth(prepare: Callable[[int], Callable[[], object]], few: int = 40) -> float:
    """How many times as many calls it takes with ten times as much. `prepare` makes what is measured."""
    return calls_of(prepare(10 * few)) / calls_of(prepare(few))


class Bench:
    def __init__(
        self,
        *,
        device: int = 16,
        host: int = 32,
        disk: int = 32,
        policy: KVPolicy = KVPolicy.SIGNAL,
        borrow: Callable[[int], int] = lambda missing: 0,
        headroom: Callable[[], int] = lambda: 0,
        window: int | None = None,
        groups: Groups | None = None,
    ) -> None:
        self.now = 100.0
        self.device, self.host = (
            BlockPool(blocks, BLOCK_SIZE, window=window, groups=groups) for blocks in (device, host)
        )
        self.cache = KVCache(self.device, self.host)
        self.tiers = KVTiers(self.cache, BLOCK_BYTES, LAYERS)
        self.placement = Placement(self.tiers, policy, disk, lambda: self.now, borrow)
        self.phases = Phases(self.placement, headroom)
        self._names = itertools.count()

    def session(
        self, tokens: int, phase: Phase | None = None, resume_in_s: float | None = None, *, first_token: int = 0
    ) -> TokenSequence:
        """A session without a turn whose `tokens` tokens have their KV on the device, until it says its phase."""
        number = next(self._names)
        sequence = TokenSequence(SessionId(f"s{number}"), number.to_bytes(2), tokens=[first_token] * tokens)
        self.cache.reserve(sequence, tokens)
        self.cache.commit(sequence, tokens)
        self.placement.end_turn(sequence)
        if phase is not None:
            self.signal(sequence, phase, resume_in_s)
        return sequence

    def placed(self, blocks: int, tier: Tier, *, first_token: int = 0) -> TokenSequence:
        """A session whose KV is in `tier`, or on its way there."""
        sequence = self.session(blocks * BLOCK_SIZE, first_token=first_token)
        self.bring_to(sequence, tier)
        self.placement.refile(sequence)
        return sequence

    def signal(self, sequence: TokenSequence, phase: Phase, resume_in_s: float | None = None) -> list[Move]:
        self.phases.signal(sequence, phase, resume_in_s)
        return self.finish()

    def tick(self, seconds: float = 0.0) -> list[Move]:
        self.now += seconds
        self.phases.tick()
        return self.finish()

    def load(self, sequence: TokenSequence) -> None:
        self.tiers.load(sequence)
        self.finish()

    def restore(self, sequence: TokenSequence) -> list[Move]:
        assert self.tiers.restore(sequence)
        return self.finish()

    def park(self, sequence: TokenSequence) -> list[Move]:
        assert self.tiers.park(sequence)
        self.placement.refile(sequence)
        return self.finish()

    def make_room(self, blocks: int, *, or_some: bool = False) -> bool:
        return self.placement.make_room(blocks, TokenSequence(SessionId("asks"), b""), or_some=or_some)

    def begin_turn(self, sequence: TokenSequence) -> TurnState:
        turn = TurnState(Ticket(1), SamplingParams(seed=0), StopRule(1), len(sequence.tokens), 0)
        sequence.turn = turn
        self.phases.forget(sequence)
        self.placement.begin_turn(sequence, turn)
        return turn

    def close(self, sequence: TokenSequence) -> None:
        self.phases.forget(sequence)
        self.placement.close(sequence)

    def orders(self) -> list[Move]:
        return self.placement.take_orders()

    def finish(self, *, error: str | None = None) -> list[Move]:
        """End every move that has been ordered, those with an `error`, and then all that follow from it."""
        done: list[Move] = []
        while moves := self.orders():
            for move in moves:
                self.complete(Moved(move.number, 0.001, error))
            done += moves
            error = None
        return done

    def complete(self, report: Moved) -> None:
        self.placement.complete(report)
        self.phases.tick()

    def bring_to(self, sequence: TokenSequence, tier: Tier) -> None:
        """Take a session on the device to `tier`, by the way that leads there."""
        if tier is Tier.DEVICE:
            return
        self.tiers.park(sequence)
        if tier is Tier.TO_HOST:
            return
        self.finish()
        if tier is Tier.TO_DEVICE:
            self.overwrite_device()
            self.tiers.restore(sequence)
        elif tier in (Tier.TO_DISK, Tier.DISK):
            self.placement.save(sequence)
            if tier is Tier.DISK:
                self.finish()

    def overwrite_device(self) -> None:
        """So that nothing of a session that has left is found there again."""
        blocks = self.device.allocate(self.device.available)
        self.device.release(blocks)


def paused_on_host(bench: Bench, computed: int) -> TokenSequence:
    """A session whose turn is paused in the pass from position `computed` on."""
    sequence = bench.session(0)
    sequence.tokens = [7] * LENGTH
    bench.cache.reserve(sequence, computed)
    bench.cache.commit(sequence, computed)
    turn = bench.begin_turn(sequence)
    rest = LENGTH - computed
    bench.cache.reserve(sequence, rest)
    hidden = HostTensor(vector(1, rest * 8).view(rest, 8), CpuStreams())
    sequence.checkpoint = Checkpoint(1, computed, rest, hidden, Pass.PREFILL, None, time.time())
    turn.paused = True
    bench.placement.end_turn(sequence)
    bench.bring_to(sequence, Tier.HOST)
    bench.placement.refile(sequence)
    return sequence
