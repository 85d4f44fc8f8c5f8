"""Turns that decode plainly are looked at once a block, and at once when something happens to them."""

from __future__ import annotations

import itertools

import pytest

from app.domain.breakpoints import Action, Breakpoint, When
from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.commands.whitebox.breakpoints import arm
from app.gpu.planning.drafting import Drafting
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.step_plan import StepPlan
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import TurnState
from app.messages import Arm
from tests.gpu.kv_tiers.tiering import BLOCK_SIZE, Bench, calls_of

LAYERS = 2


class Decoding:
    """Turns that decode, step by step."""

    def __init__(self, turns: int) -> None:
        """Each turn has room for eight blocks."""
        self.bench = Bench(device=8 * turns)
        cache = self.bench.cache
        self.scheduler = Scheduler(
            self.bench.placement,
            Drafting(cache, max_tokens=0, num_layers=LAYERS, max_model_len=1000),
            num_layers=LAYERS,
            max_step_tokens=1024,
            max_running=turns,
            shared_prompt_tokens=512,
            shared_rows=1 << 10,
            prompts_rest=True,
        )
        self.sequences = [self.bench.session(BLOCK_SIZE + 1, first_token=number) for number in range(turns)]
        for sequence, number in zip(self.sequences, itertools.count(1), strict=False):
            tokens = len(sequence.tokens)
            sequence.turn = TurnState(Ticket(number), SamplingParams(seed=0), StopRule(1000), tokens, 0)
            self.scheduler.enqueue(sequence, sequence.turn)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        for row in plan.rows:
            self.bench.cache.commit(row.sequence, row.end)
            row.sequence.tokens.append(0)
        return plan

    def step_to(self, offset: int) -> TokenSequence:
        """Step until the next token of all has this place in its block; returns one of them."""
        sequence = self.sequences[0]
        for _ in range(3 * BLOCK_SIZE):
            self.step()
        while sequence.computed % BLOCK_SIZE != offset:
            self.step()
        return sequence


@pytest.mark.parametrize(("offset", "most"), [(2, 5.0), (0, 20.0)])
def test_a_turn_that_decodes_costs_a_few_calls(offset: int, most: float) -> None:
    counts = []
    for turns in (8, 64):
        decoding = Decoding(turns)
        decoding.step_to(offset)
        counts.append(calls_of(decoding.scheduler.plan))
    few, many = counts
    assert (many - few) / 56 <= most


@pytest.mark.parametrize("offset", range(BLOCK_SIZE))
def test_a_turn_whose_blocks_are_shared_writes_to_a_copy(offset: int) -> None:
    decoding = Decoding(2)
    sequence = decoding.step_to(offset)
    child = decoding.bench.cache.fork(sequence, SessionId("child"))
    shared = list(child.blocks)
    begun = shared[sequence.computed // BLOCK_SIZE :]
    assert [source for source, _ in decoding.step().copies] == begun
    assert len(begun) == (offset > 0)
    assert child.blocks == shared
    decoding.scheduler.check_integrity()


@pytest.mark.parametrize("offset", range(BLOCK_SIZE))
def test_a_breakpoint_meets_the_next_token(offset: int) -> None:
    decoding = Decoding(2)
    sequence = decoding.step_to(offset)
    breakpoint = Breakpoint("bp_next", (0,), Action.PAUSE, When(position=sequence.computed))
    arm(sequence, Arm(Ticket(9), sequence.session, breakpoint))
    rows = decoding.scheduler.plan().rows
    assert {row.sequence: row.way.pauses for row in rows} == {each: each is sequence for each in decoding.sequences}


@pytest.mark.parametrize("offset", range(BLOCK_SIZE))
def test_a_turn_loses_its_place_and_goes_on_while_its_kv_is_copied(offset: int) -> None:
    decoding = Decoding(2)
    sequence = decoding.step_to(offset)
    decoding.scheduler.queue.preempt(sequence)
    decoding.bench.placement.eviction.evict(sequence, decoding.sequences[1])
    [move] = decoding.bench.orders()
    for _ in range(BLOCK_SIZE):
        plan = decoding.step()
        written = {row.sequence.blocks[row.first // BLOCK_SIZE] for row in plan.rows}
        assert sequence in {row.sequence for row in plan.rows}
        assert written.isdisjoint(move.source)
        decoding.scheduler.check_integrity()
