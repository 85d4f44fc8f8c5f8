"""When weights give way to KV and when they come back, also in the planning machine with all tiers."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from app.domain.values import KVPolicy, Phase, Tier
from app.gpu.planning.admission import PATIENCE_STEPS, Borrower
from app.gpu.planning.queue import StepPlan
from app.gpu.state.blocks import BlockId
from app.gpu.state.sequence import TokenSequence
from app.gpu.weights.arena import Arena, lay_out, plan_weights
from tests.gpu.kv.test_tier_machine import TierMachine
from tests.gpu.kv.tiering import BLOCK_BYTES, BLOCK_SIZE, Bench
from tests.gpu.planning.test_planning_machine import PlanningMachine

pytestmark = pytest.mark.timeout(600)  # all examples, however slow the machine

LAYER = 10 * 256


def arena_of(kv_blocks: int, kept: int) -> Arena:
    """Bundles of 2.56 blocks each, of which `kept` can be lent."""
    return lay_out(plan_weights([LAYER] * (kept + 3), (kept + 2) * LAYER), kv_blocks, BLOCK_BYTES)


class FakeWeights:
    """Weights whose bundles write over the blocks that they come back to."""

    def __init__(self, arena: Arena, memory: dict[tuple[int, int], tuple[object, ...]]) -> None:
        self.arena = arena
        self.memory = memory
        self.kept = set(arena.places)

    def lend(self, bundle: int) -> None:
        self.kept.remove(bundle)

    def take_back(self, bundle: int) -> None:
        assert bundle not in self.kept
        self.kept.add(bundle)
        first = self.arena.places[bundle].start // BLOCK_BYTES
        for block, offset in list(self.memory):
            if block >= first:
                self.memory[block, offset] = ("weights",)


def borrower_of(
    weights: FakeWeights, copy: Callable[[Sequence[tuple[BlockId, BlockId]]], None] = lambda copies: None
) -> Borrower:
    return Borrower(weights.arena, weights.lend, weights.take_back, copy)


@pytest.mark.parametrize(
    ("policy", "phase", "gives_way"),
    [
        (KVPolicy.SIGNAL, Phase.COMPUTE, True),
        (KVPolicy.SIGNAL, Phase.READY, False),
        (KVPolicy.LRU, Phase.COMPUTE, True),
        (KVPolicy.NONE, Phase.COMPUTE, False),
    ],
)
def test_what_rests_in_borrowed_memory_gives_way_to_weights(policy: KVPolicy, phase: Phase, gives_way: bool) -> None:
    borrower = borrower_of(FakeWeights(arena_of(16, 4), {}))
    bench = Bench(policy=policy, borrow=borrower.borrow)
    settle = partial(borrower.settle, bench.placement, lambda: 0, idle=False)
    turns = list[TokenSequence]()
    for _ in range(2):  # weights lend what the second lacks
        assert bench.device.available >= 10 or bench.make_room(10)
        turns.append(bench.session(10 * BLOCK_SIZE))
        bench.begin_turn(turns[-1])
    first, second = turns
    first.turn = None
    bench.placement.end_turn(first)
    first.phase = phase
    for _ in range(PATIENCE_STEPS - 1):
        settle()
    assert borrower.lent == 2
    settle()
    assert first.tier is (Tier.TO_HOST if gives_way else Tier.DEVICE)
    bench.finish()
    for _ in range(PATIENCE_STEPS):
        settle()
    assert borrower.lent == (0 if gives_way else 2)
    assert second.tier is Tier.DEVICE
    assert max(second.blocks) < borrower.blocks


class LendingMachine(TierMachine):
    """Steps that borrow from weights, which come back over what was there: also where a move uses it."""

    sessions = PlanningMachine.sessions

    def __init__(self) -> None:
        super().__init__()
        self.arena = arena_of(self.DEVICE_BLOCKS, 4)
        self.weights = FakeWeights(self.arena, self.model.device)
        self.borrower = borrower_of(self.weights, self.copy)

    def borrow(self, missing: int) -> int:
        return self.borrower.borrow(missing)

    def settle_loans(self, *, idle: bool) -> bool:
        return self.borrower.settle(self.placement, self.scheduler.headroom, idle=idle)

    def copy(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        self.model.run(StepPlan(copies=list(copies)))

    def step(self, token: int, follow: int = 0) -> None:
        """No step follows another where memory may change hands between them."""
        self.settle_loans(idle=not self.scheduler.has_work)
        super().step(token)

    @invariant()
    def the_boundary_is_where_both_sides_think(self) -> None:
        assert self.pool.num_blocks == self.borrower.blocks
        assert self.weights.kept == set(self.arena.places) - set(self.arena.lendable[: self.borrower.lent])

    def teardown(self) -> None:
        """What has been lent comes back when nobody is left."""
        super().teardown()
        while self.settle_loans(idle=True):
            pass
        assert self.borrower.lent == 0


TestLending = LendingMachine.TestCase
TestLending.settings = settings(stateful_step_count=60)
