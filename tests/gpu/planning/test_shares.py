"""Prompts of several tenants: each has its share of what steps compute, however many prompts another one sends."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.planning.queue import ActiveTurn
from app.gpu.planning.shares import TenantShares
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import TurnState

QUANTUM, STEP_TOKENS = 8, 32
MOST_BEHIND = QUANTUM + STEP_TOKENS
"""Tokens that one tenant may be behind another, both of which always have prompts."""
NUMBERS = itertools.count(1)
tenants = st.sampled_from(["a", "b", "c"])
prompts = st.tuples(tenants, st.integers(1, 3 * STEP_TOKENS))


def claim(tenant: str, tokens: int) -> ActiveTurn:
    number = next(NUMBERS)
    turn = TurnState(Ticket(number), SamplingParams(seed=0), StopRule(1), tokens, 0)
    return ActiveTurn(TokenSequence(SessionId(f"s{number}"), b"", tokens=[0] * tokens, tenant=tenant), turn)


class Steps:
    """Computes prompts in steps of `STEP_TOKENS`, in the order that the shares give them."""

    def __init__(self) -> None:
        self.shares = TenantShares(QUANTUM, STEP_TOKENS)
        self.claims: list[ActiveTurn] = []
        self.computed: Counter[str] = Counter()

    def add(self, tenant: str, tokens: int) -> ActiveTurn:
        added = claim(tenant, tokens)
        self.claims.append(added)
        return added

    def run(self) -> None:
        left = STEP_TOKENS
        for active in self.shares.order(self.claims):
            length = min(left, active.sequence.pending)
            if length:
                active.sequence.computed += length
                self.shares.spend(active.sequence.tenant, length)
                self.computed[active.sequence.tenant] += length
            left -= length
        self.claims = [active for active in self.claims if active.sequence.pending]

    def until(self, waited_for: ActiveTurn) -> int:
        """Steps until that prompt is whole."""
        for number in itertools.count(1):
            self.run()
            if not waited_for.sequence.pending:
                return number
        raise AssertionError


@given(st.lists(prompts, max_size=20))
def test_the_order_loses_no_turn_and_keeps_each_tenants_own(sent: list[tuple[str, int]]) -> None:
    claims = [claim(*prompt) for prompt in sent]
    ordered = TenantShares(QUANTUM, STEP_TOKENS).order(claims)
    assert len(ordered) == len(claims)
    for tenant in ("a", "b", "c"):
        own = [each for each in ordered if each.sequence.tenant == tenant]
        assert own == [each for each in claims if each.sequence.tenant == tenant]


@given(st.lists(st.integers(1, 3 * STEP_TOKENS), min_size=1), st.lists(st.integers(1, 3 * STEP_TOKENS), min_size=1))
def test_who_always_has_prompts_has_an_equal_share_whatever_their_lengths(one: list[int], other: list[int]) -> None:
    steps, lengths = Steps(), {"a": itertools.cycle(one), "b": itertools.cycle(other)}
    for _ in range(60):
        for tenant, own in lengths.items():
            while sum(c.sequence.pending for c in steps.claims if c.sequence.tenant == tenant) < 2 * STEP_TOKENS:
                steps.add(tenant, next(own))
        steps.run()
        assert abs(steps.computed["a"] - steps.computed["b"]) <= MOST_BEHIND


@given(st.lists(st.lists(prompts, max_size=4), max_size=30), st.integers(1, STEP_TOKENS), st.integers(1, 300))
def test_one_prompt_waits_for_a_bounded_part_of_the_others_prompts(
    before: list[list[tuple[str, int]]], tokens: int, waiting: int
) -> None:
    steps = Steps()
    for arrivals in before:
        for prompt in arrivals:
            steps.add(*prompt)
        steps.run()
    for _ in range(waiting):
        steps.add("a", STEP_TOKENS)
    others = sum(steps.computed.values())
    steps.until(steps.add("new", tokens))
    # All but the new one's own tokens went to three tenants that may have been behind by so much each.
    assert sum(steps.computed.values()) - tokens - others <= 3 * (MOST_BEHIND + QUANTUM + STEP_TOKENS) + STEP_TOKENS


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    steps = Steps()
    steps.until(steps.add("b", 1))
    for _ in range(100):
        steps.add("a", STEP_TOKENS)
    for _ in range(50):
        steps.run()
    for _ in range(100):
        steps.add("b", STEP_TOKENS)
    before = Counter(steps.computed)
    for _ in range(20):
        steps.run()
    had = steps.computed - before
    assert abs(had["a"] - had["b"]) <= MOST_BEHIND


def test_small_prompts_of_every_step_save_nothing_up() -> None:
    """One of the tenants has prompts in each step, but never many."""
    steps = Steps()
    for _ in range(100):
        steps.add("a", STEP_TOKENS)
    for _ in range(50):
        steps.add("b", 1)
        steps.run()
    before = Counter(steps.computed)
    for _ in range(100):
        steps.add("b", STEP_TOKENS)
    for _ in range(20):
        steps.run()
    had = steps.computed - before
    assert abs(had["a"] - had["b"]) <= 2 * MOST_BEHIND
