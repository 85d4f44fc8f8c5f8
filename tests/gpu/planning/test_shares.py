"""Prompts and breakpoints of several tenants: each has its share of steps, however many turns another one has."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.breakpoints import STEP_WORK
from app.domain.values import SessionId
from app.gpu.planning.queue import Fairness, TurnQueue, VirtualTime
from app.gpu.state.sequence import TokenSequence

STEP_TOKENS = 32
MOST_BEHIND = 2 * STEP_TOKENS
"""Tokens that one tenant may be behind another at most."""
NUMBERS = itertools.count(1)
tenants = st.sampled_from(["a", "b", "c"])
prompts = st.tuples(tenants, st.integers(1, 3 * STEP_TOKENS))


def claim(tenant: str, tokens: int) -> TokenSequence:
    number = next(NUMBERS)
    return TokenSequence(SessionId(f"s{number}"), b"", tokens=[0] * tokens, tenant=tenant)


def in_turn(shares: VirtualTime, claims: list[TokenSequence]) -> list[TokenSequence]:
    return shares.in_turn(claims, lambda each: each.tenant, lambda each: min(each.pending, STEP_TOKENS))


class Steps:
    """Computes prompts in steps of `STEP_TOKENS`, in the order that the shares give them."""

    def __init__(self) -> None:
        self.shares = VirtualTime(MOST_BEHIND)
        self.claims: list[TokenSequence] = []
        self.computed: Counter[str] = Counter()
        self.without: str | None = None
        """A tenant that has no room for now."""

    def add(self, tenant: str, tokens: int) -> TokenSequence:
        added = claim(tenant, tokens)
        self.claims.append(added)
        return added

    def run(self) -> None:
        left = STEP_TOKENS
        for each in in_turn(self.shares, self.claims):
            length = min(left, each.pending)
            if length and each.tenant != self.without:
                each.computed += length
                self.shares.charge(each.tenant, length)
                self.computed[each.tenant] += length
                left -= length
        self.claims = [each for each in self.claims if each.pending]

    def until(self, waited_for: TokenSequence) -> int:
        """Steps until that prompt is whole."""
        for number in itertools.count(1):
            self.run()
            if not waited_for.pending:
                return number
        raise AssertionError


@given(st.lists(st.integers(1, 3 * STEP_TOKENS), min_size=1), st.lists(st.integers(1, 3 * STEP_TOKENS), min_size=1))
def test_who_always_has_prompts_has_an_equal_share_whatever_their_lengths(one: list[int], other: list[int]) -> None:
    steps, lengths = Steps(), {"a": itertools.cycle(one), "b": itertools.cycle(other)}
    for _ in range(60):
        for tenant, own in lengths.items():
            while sum(c.pending for c in steps.claims if c.tenant == tenant) < 2 * STEP_TOKENS:
                steps.add(tenant, next(own))
        steps.run()
        assert abs(steps.computed["a"] - steps.computed["b"]) <= STEP_TOKENS


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
    assert sum(steps.computed.values()) - tokens - others <= 3 * MOST_BEHIND + STEP_TOKENS


@pytest.mark.parametrize("meanwhile", [0, 1])
def test_a_tenant_with_few_prompts_has_saved_nothing_up(meanwhile: int) -> None:
    """Neither one that comes back, nor one that had a small prompt in each step."""
    steps = Steps()
    steps.until(steps.add("b", 1))
    for _ in range(100):
        steps.add("a", STEP_TOKENS)
    for _ in range(50):
        if meanwhile:
            steps.add("b", meanwhile)
        steps.run()
    for _ in range(100):
        steps.add("b", STEP_TOKENS)
    before = Counter(steps.computed)
    for _ in range(20):
        steps.run()
    had = steps.computed - before
    assert abs(had["a"] - had["b"]) <= STEP_TOKENS


def test_what_a_tenant_was_charged_while_it_was_alone_is_not_held_against_it() -> None:
    steps = Steps()
    for tenant in ("a", "b"):
        steps.add(tenant, 3 * STEP_TOKENS)
    steps.run()
    steps.claims.clear()  # both prompts are cancelled; the order is not looked at again while one tenant is there
    steps.shares.charge("a", 1000 * STEP_TOKENS)
    for _ in range(100):
        steps.add("b", STEP_TOKENS)
    others = steps.computed["b"]
    steps.until(steps.add("a", STEP_TOKENS))
    assert steps.computed["b"] - others <= MOST_BEHIND + STEP_TOKENS


def test_a_tenant_that_waits_for_room_saves_nothing_up_and_nor_do_those_that_come_meanwhile() -> None:
    steps = Steps()
    steps.without = "blocked"
    for tenant in ("a", "blocked"):
        for _ in range(200):
            steps.add(tenant, STEP_TOKENS)
    for _ in range(100):
        steps.run()
    for _ in range(200):
        steps.add("late", STEP_TOKENS)
    steps.without = None
    before = Counter(steps.computed)
    for _ in range(30):
        steps.run()
    had = steps.computed - before
    assert max(had.values()) - had["a"] <= MOST_BEHIND


MOST = STEP_WORK
TENANT = "one"
WORK = st.integers(1, 2 * MOST)


def work_of_steps() -> Fairness:
    return Fairness(TurnQueue(), prompt_tokens=1, rows=1, prompts_rest=False)


def sessions(count: int) -> list[SessionId]:
    return [SessionId(f"ses_{number}") for number in range(count)]


@given(many=st.integers(1, 12), greedy_work=WORK, work=WORK)
def test_tenants_have_their_turns_however_many_sessions_another_has(many: int, greedy_work: int, work: int) -> None:
    budget, (own, *others) = work_of_steps(), sessions(1 + many)
    had, greedy_had = 0, 0
    for _ in range(60):
        budget.begin_step()
        greedy_had += sum(greedy_work for session in others if budget.take_work(session, "greedy", greedy_work))
        had += work if budget.take_work(own, TENANT, work) else 0
    assert had >= min(60 * work, greedy_had) // 3 - 4 * MOST
