"""Prompts that nobody's load may cut: what they take beyond their part of a step, they do without in the next."""

from __future__ import annotations

from itertools import pairwise

import pytest

from app.domain.breakpoints import When
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt

pytestmark = pytest.mark.usefixtures("one_thread")

STEP_TOKENS, UNCUT, ANSWER = 64, 60, 30


def long_rows(driver: BreakDriver) -> list[int]:
    """Tokens of prompts in each step."""
    return [sum(row.length for row in plan.rows if row.length > 1 and not row.draft) for plan in driver.plans]


@pytest.mark.parametrize("other", ["many", "one"])
def test_rows_that_are_not_cut_leave_steps_to_those_who_decode(tiny_llama: TinyModel, other: str) -> None:
    engine = tiny_llama.engine(max_step_tokens=STEP_TOKENS)
    engine._scheduler.shared.prompt_tokens = STEP_TOKENS
    driver = BreakDriver(engine)
    one = driver.submit(driver.open("one"), prompt(0, 3), ANSWER)
    while not driver.tokens(one):
        driver.take(driver.engine.step())
    whole = []
    for seed in range(1, 6):
        session = driver.open(other)
        driver.arm(session, 1, when=When(token_id=500))  # never
        whole.append(driver.submit(session, prompt(seed, UNCUT), 1))
    driver.plans.clear()
    driver.finish(*whole)
    rows = long_rows(driver)
    assert all(tokens % UNCUT == 0 for tokens in rows)  # whole, as the client sees them
    # No step may be given to the device before such a one has ended, or prompts wait as long as others decode.
    assert all(plan.passed_over for plan, tokens in zip(driver.plans, rows, strict=True) if not tokens)
    if other == "many":
        assert all(sum(pair) <= UNCUT for pair in pairwise(rows))
    else:
        assert len(rows) <= len(whole)
    driver.finish(one)
