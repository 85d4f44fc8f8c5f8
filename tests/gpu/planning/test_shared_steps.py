"""Prompts of several tenants: each of them rests beside the others, and no step is empty for that."""

from __future__ import annotations

import pytest

from app.domain.values import SamplingParams, StopRule, Ticket, Tier
from app.gpu.planning.drafting import Drafting
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.step_plan import StepPlan
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import TurnState
from tests.gpu.kv_tiers.tiering import BLOCK_SIZE, Bench

STEP_TOKENS, PART = 64, 16


class Tenants:
    """Turns of several tenants, step by step."""

    def __init__(self, *, prompts_rest: bool = True) -> None:
        self.bench = Bench(device=400, host=100, disk=100)
        cache = self.bench.cache
        self.scheduler = Scheduler(
            self.bench.placement,
            Drafting(cache, max_tokens=0, num_layers=2, max_model_len=1000),
            num_layers=2,
            max_step_tokens=STEP_TOKENS,
            max_running=8,
            shared_prompt_tokens=PART,
            shared_rows=8,
            prompts_rest=prompts_rest,
        )

    def begin(self, tenant: str, tokens: int, sequence: TokenSequence | None = None) -> None:
        sequence = sequence or self.bench.session(0)
        sequence.tenant = tenant
        sequence.tokens.extend([ord(tenant)] * tokens)
        sequence.turn = TurnState(Ticket(1), SamplingParams(seed=0), StopRule(1000), len(sequence.tokens), 0)
        self.scheduler.enqueue(sequence, sequence.turn)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        for row in plan.rows:
            self.bench.cache.commit(row.sequence, row.end)
            if row.end == len(row.sequence.tokens):
                row.sequence.tokens.append(0)
        return plan


def prompt_tokens(plan: StepPlan) -> int:
    return sum(row.length for row in plan.rows if row.length > 1)


@pytest.mark.parametrize(("prompts_rest", "most"), [(True, 10), (False, 20)])
def test_prompts_leave_every_second_step_to_a_tenant_that_decodes(prompts_rest: bool, most: int) -> None:
    tenants = Tenants(prompts_rest=prompts_rest)
    tenants.begin("a", 4)
    tenants.step()
    tenants.begin("b", 600)
    steps = [prompt_tokens(tenants.step()) for _ in range(20)]
    assert sum(tokens > 0 for tokens in steps) == most
    assert set(steps) <= {0, PART // 2}


def test_prompts_do_not_rest_for_a_turn_whose_kv_is_on_its_way() -> None:
    tenants = Tenants()
    away = tenants.bench.session(10 * BLOCK_SIZE, first_token=7)
    tenants.bench.bring_to(away, Tier.DISK)
    tenants.bench.placement.refile(away)
    tenants.begin("a", 600)
    tenants.begin("c", 300)
    tenants.step()
    tenants.begin("b", 3, away)
    assert all(prompt_tokens(tenants.step()) for _ in range(12))
    assert tenants.bench.tiers.ledger.in_flight
