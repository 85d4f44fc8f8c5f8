"""Steps that a scheduler plans without an engine: turns that decode cost little, and prompts rest beside them."""

from __future__ import annotations

import itertools

import pytest

from app.domain.breakpoints import Action, Breakpoint, When
from app.domain.values import SamplingParams, StopRule, Ticket, Tier
from app.gpu.commands.whitebox.breakpoints import arm
from app.gpu.planning.drafting import Drafting
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.step_plan import StepPlan
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import TurnState
from app.messages import Arm
from tests.gpu.kv_tiers.tiering import BLOCK_SIZE, Bench, calls_of

PROMPT_TOKENS = 16
"""In a step of tenants that share it."""


class Steps:
    """Turns of several sessions, step by step."""

    def __init__(self, bench: Bench, *, step_tokens: int = 64, max_running: int = 8, prompts_rest: bool = True) -> None:
        self.bench = bench
        self.scheduler = Scheduler(
            bench.placement,
            Drafting(bench.cache, max_tokens=0, num_layers=2, max_model_len=1000),
            num_layers=2,
            max_step_tokens=step_tokens,
            max_running=max_running,
            shared_prompt_tokens=step_tokens // 4,
            shared_rows=1 << 10,
            prompts_rest=prompts_rest,
        )
        self.tickets = map(Ticket, itertools.count(1))

    def begin(self, tenant: str, tokens: int, sequence: TokenSequence | None = None) -> None:
        sequence = sequence or self.bench.session(0)
        sequence.tenant = tenant
        sequence.tokens.extend([ord(tenant)] * tokens)
        turn = TurnState(next(self.tickets), SamplingParams(seed=0), StopRule(1000), len(sequence.tokens), 0)
        sequence.turn = turn
        self.scheduler.enqueue(sequence, turn)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        for row in plan.rows:
            self.bench.cache.commit(row.sequence, row.end)
            if row.end == len(row.sequence.tokens):
                row.sequence.tokens.append(0)
        return plan


def decoding(turns: int, offset: int) -> tuple[Steps, list[TokenSequence]]:
    """Turns that decode, each with room for eight blocks, whose next token has this place in its block."""
    steps = Steps(Bench(device=8 * turns), step_tokens=1024, max_running=turns)
    sequences = [steps.bench.session(BLOCK_SIZE + 1, first_token=number) for number in range(turns)]
    for sequence in sequences:
        steps.begin("a", 0, sequence)
    for _ in range(3 * BLOCK_SIZE):
        steps.step()
    while sequences[0].computed % BLOCK_SIZE != offset:
        steps.step()
    return steps, sequences


at_every_offset = pytest.mark.parametrize("offset", range(BLOCK_SIZE))


@pytest.mark.parametrize(("offset", "most"), [(2, 5.0), (0, 20.0)])
def test_a_turn_that_decodes_costs_a_few_calls(offset: int, most: float) -> None:
    few, many = (calls_of(decoding(turns, offset)[0].scheduler.plan) for turns in (8, 64))
    assert (many - few) / 56 <= most


@at_every_offset
def test_a_breakpoint_meets_the_next_token(offset: int) -> None:
    steps, sequences = decoding(2, offset)
    sequence = sequences[0]
    breakpoint = Breakpoint("bp_next", (0,), Action.PAUSE, When(position=sequence.computed))
    arm(sequence, Arm(Ticket(9), sequence.session, breakpoint))
    rows = steps.scheduler.plan().rows
    assert {row.sequence: row.way.pauses for row in rows} == {each: each is sequence for each in sequences}


def prompt_tokens(plan: StepPlan) -> int:
    return sum(row.length for row in plan.rows if row.length > 1)


@pytest.mark.parametrize(("prompts_rest", "most"), [(True, 10), (False, 20)])
def test_prompts_leave_every_second_step_to_a_tenant_that_decodes(prompts_rest: bool, most: int) -> None:
    steps = Steps(Bench(device=400), prompts_rest=prompts_rest)
    steps.begin("a", 4)
    steps.step()
    steps.begin("b", 600)
    tokens = [prompt_tokens(steps.step()) for _ in range(20)]
    assert sum(each > 0 for each in tokens) == most
    assert set(tokens) <= {0, PROMPT_TOKENS // 2}


def test_prompts_do_not_rest_for_a_turn_whose_kv_is_on_its_way() -> None:
    steps = Steps(Bench(device=400, host=100, disk=100))
    away = steps.bench.session(10 * BLOCK_SIZE, first_token=7)
    steps.bench.bring_to(away, Tier.DISK)
    steps.bench.placement.refile(away)
    steps.begin("a", 600)
    steps.begin("c", 300)
    steps.step()
    steps.begin("b", 3, away)
    assert all(prompt_tokens(steps.step()) for _ in range(12))
    assert steps.bench.tiers.ledger.in_flight
