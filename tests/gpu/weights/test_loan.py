"""When weights give way to KV and when they come back: under any load, and in the planning machine with all tiers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from app.domain.values import KVPolicy, Phase, Tier
from app.gpu.kv.loan import PATIENCE_STEPS, Borrower, KVLoans, LoanBook
from app.gpu.planning.step_plan import StepPlan
from app.gpu.state.blocks import BlockId
from app.gpu.state.sequence import TokenSequence
from app.gpu.weights.arena import Arena, lay_out
from app.gpu.weights.residency import plan_weights
from tests.gpu.kv.test_tier_machine import TierMachine
from tests.gpu.kv.tiering import BLOCK_BYTES, BLOCK_SIZE, Bench
from tests.gpu.planning.test_planning_machine import PlanningMachine

pytestmark = pytest.mark.timeout(600)  # a hundred examples, however slow the machine

LAYER = 10 * 256


def arena_of(kv_blocks: int, kept: int) -> Arena:
    """Bundles of 2.56 blocks each, of which `kept` can be lent."""
    return lay_out(plan_weights([LAYER] * (kept + 3), (kept + 2) * LAYER), kv_blocks, BLOCK_BYTES)


@given(needs=st.lists(st.integers(0, 60), max_size=120), kept=st.integers(0, 12))
def test_whatever_the_load_a_bundle_stays_lent_for_some_steps_and_no_longer_than_that(
    needs: list[int], kept: int
) -> None:
    arena = arena_of(20, kept)
    book = LoanBook(arena)
    lent_for: list[int] = []
    """For how many steps each bundle has been lent."""
    without = 0
    for needed in [*needs, *[0] * (PATIENCE_STEPS + kept)]:
        lent = book.lend(needed - book.blocks) if needed > book.blocks else ()
        lent_for += [0] * len(lent)
        assert book.blocks >= needed or needed > arena.most_blocks
        assert book.lent == len(lent_for)
        without = without + 1 if needed <= arena.blocks(max(0, book.lent - 1)) else 0
        lent_for = [steps + 1 for steps in lent_for]
        surplus = book.surplus(needed, idle=False) if book.lent else None
        if surplus is not None:
            before = book.blocks
            assert lent_for.pop() >= PATIENCE_STEPS
            assert arena.lendable[len(lent_for)] == book.take_back()
            assert book.blocks == before - surplus >= needed
        else:
            assert not book.lent or without < PATIENCE_STEPS
    assert book.lent == 0
    assert book.blocks == 20


def test_no_more_is_lent_than_is_needed_and_an_idle_engine_takes_it_back_at_once() -> None:
    book = LoanBook(arena_of(20, 4))
    assert len(book.lend(3)) == 2
    assert book.blocks == 25
    assert not book.lend(6), "nothing where it would not be enough"
    assert book.blocks == 25
    assert book.surplus(23, idle=True) is None
    assert book.surplus(20, idle=True) == 3
    assert len(book.lend(5)) == 2


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
    book = LoanBook(arena_of(16, 4))
    borrower = Borrower(book, FakeWeights(arena_of(16, 4), {}))
    bench = Bench(policy=policy, borrow=borrower.borrow)
    loans = KVLoans(borrower, bench.placement, lambda: 0, lambda copies: None)
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
        loans.settle(idle=False)
    assert book.lent == 2
    loans.settle(idle=False)
    assert first.tier is (Tier.TO_HOST if gives_way else Tier.DEVICE)
    bench.finish()
    for _ in range(PATIENCE_STEPS):
        loans.settle(idle=False)
    assert book.lent == (0 if gives_way else 2)
    assert second.tier is Tier.DEVICE
    assert max(second.blocks) < book.blocks


class LendingMachine(TierMachine):
    """Steps that borrow from weights, which come back over what was there: also where a move uses it."""

    sessions = PlanningMachine.sessions

    def __init__(self) -> None:
        super().__init__()
        self.arena = arena_of(self.DEVICE_BLOCKS, 4)
        self.book = LoanBook(self.arena)
        self.weights = FakeWeights(self.arena, self.model.device)
        self.borrower = Borrower(self.book, self.weights)
        self.loans = KVLoans(self.borrower, self.placement, self.scheduler.headroom, self.copy)

    def borrow(self, missing: int) -> int:
        return self.borrower.borrow(missing)

    def copy(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        self.model.run(StepPlan(copies=list(copies)))

    def step(self, token: int, follow: int = 0) -> None:
        """No step follows another where memory may change hands between them."""
        self.loans.settle(idle=not self.scheduler.has_work)
        super().step(token)

    @invariant()
    def the_boundary_is_where_both_sides_think(self) -> None:
        assert self.pool.num_blocks == self.book.blocks
        assert self.weights.kept == set(self.arena.places) - set(self.arena.lendable[: self.book.lent])

    def teardown(self) -> None:
        """What has been lent comes back when nobody is left."""
        super().teardown()
        while self.loans.settle(idle=True):
            pass
        assert self.book.lent == 0


TestLending = LendingMachine.TestCase
TestLending.settings = settings(stateful_step_count=60)
