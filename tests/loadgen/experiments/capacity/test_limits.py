"""A probe ends early only if it can only fail, and says which limit it misses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.experiments.capacity.limits import TPOT, TTFT, Hopes, fatal
from loadgen.experiments.capacity.wording import why
from loadgen.load.records import Failure, Run
from loadgen.load.workload import plan_trace
from loadgen.stats import Distribution
from tests.loadgen.experiments.capacity.building import PLAN, probe, turn


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 300))
def test_so_many_over_a_limit_put_p95_over_it_now_and_in_the_end(samples: int, over: int, seen: int) -> None:
    over, seen = min(over, samples), min(seen, samples)
    final, so_far = ([0.0] * (count - over) + [1.0] * over for count in (samples, max(seen, over)))
    if over >= fatal(samples):
        assert all(found is not None and found.p95 > 0.5 for found in map(Distribution.of, (final, so_far)))
    else:
        found = Distribution.of([0.0] * (samples - over) + [0.5 + 1e-9] * over)
        assert found is not None
        assert found.p95 <= 0.5 + 1e-9


def test_hopes_are_gone_with_the_turn_that_decides() -> None:
    trace = plan_trace(PLAN.load_of(50))
    hopes, run = Hopes(PLAN, trace), Run()
    slow = fatal(100)
    seen = []
    for agent in range(int(slow) + 1):
        run.turns.append(turn(agent, 1, ttft_s=2.0))
        seen.append(hopes.are_gone(run))
    assert seen == [False] * 5 + [True] * 2


def test_first_turns_may_be_slow_to_begin() -> None:
    hopes = Hopes(PLAN, plan_trace(PLAN.load_of(4)))
    assert not hopes.are_gone(Run(turns=[turn(agent, 0, ttft_s=60.0) for agent in range(4)]))


def test_hopes_are_gone_with_slow_tokens_and_with_any_failure() -> None:
    trace = plan_trace(PLAN.load_of(1))
    assert Hopes(PLAN, trace).are_gone(Run(turns=[turn(0, 0, tpot_s=0.3)] * 2))
    assert Hopes(PLAN, trace).are_gone(Run(failures=[Failure(0, None, 1.0, "Timeout", "no answer")]))


def test_a_limit_that_is_missed_is_named_with_its_factor() -> None:
    slow = probe(8, 2.5, 0.5)
    assert [(miss.what, miss.p95_s) for miss in slow.misses] == [(TTFT, 2.5), (TPOT, pytest.approx(0.5))]
    assert why(slow).startswith("first token of a resumed turn: p95 2.50 s, 2.5 times the limit; time per token: p95")
    assert not slow.held


def test_a_probe_at_its_limits_is_held_and_one_with_an_error_is_not() -> None:
    assert probe(4, 1.0).held
    refused = probe(4, 0.1, failures=[Failure(0, 2, 1.0, "RateLimited", "full")])
    assert not refused.held
    assert why(refused) == "errors: RateLimited 1"
