"""Whose prompt a step computes: the one nearest to its next token, but nobody waits for ever."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from app.domain.values import SessionId, Ticket
from app.messages import Fork
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import Driver
from tests.gpu.oracle import greedy_tokens
from tests.gpu.tiny_engine import driver, make_engine, model, oracle, prompt

__all__ = ["driver", "model", "oracle"]
pytestmark = pytest.mark.usefixtures("one_thread")

STEP_TOKENS = 16
LONG, SHORT = 100, 3
THREE_LAYERS = 3 * 147_968


def steps_until(driver: Driver, turn: Ticket) -> int:
    """How many steps run until the turn's first token."""
    steps = 0
    while not driver.tokens(turn):
        driver.take(driver.engine.step())
        driver.move()
        steps += 1
    return steps


def test_a_turn_that_goes_on_does_not_wait_for_long_first_prompts(driver: Driver) -> None:
    session = driver.open()
    driver.finish(driver.submit(session, prompt(0, LONG), 2))
    long = [driver.submit(driver.open(), prompt(seed, LONG), 2) for seed in (1, 2, 3)]
    driver.take(driver.engine.step())
    short = driver.submit(session, prompt(4, SHORT), 2)
    assert steps_until(driver, short) == 1
    assert not any(driver.tokens(turn) for turn in long)


def test_a_long_prompt_is_not_passed_over_for_ever(driver: Driver) -> None:
    """Short turns come with every step, and each of them could have all of it."""
    long, steps = driver.submit(driver.open(), prompt(1, LONG), 2), 0
    while not driver.tokens(long):
        for number in range(4):
            driver.submit(driver.open(), prompt(steps + number, SHORT), 1)
        driver.take(driver.engine.step())
        steps += 1
        assert steps < 400


def test_one_prompt_of_a_tenant_does_not_wait_behind_a_hundred_of_another(driver: Driver) -> None:
    many = [driver.submit(driver.open("many"), prompt(seed, SHORT), 1) for seed in range(100)]
    one = driver.submit(driver.open("one"), prompt(100, SHORT), 1)
    assert steps_until(driver, one) <= 4  # steps have half as many tokens as those of one tenant
    driver.finish(*many)


def test_a_long_prompt_of_a_tenant_has_half_of_what_prompts_get(driver: Driver) -> None:
    length = LONG // 5
    many = [driver.submit(driver.open("many"), prompt(seed, length), 1) for seed in range(100)]
    one = driver.submit(driver.open("one"), prompt(100, LONG), 1)
    steps_until(driver, one)
    computed = length * sum(bool(driver.tokens(turn)) for turn in many)
    assert abs(computed - LONG) <= 2 * STEP_TOKENS


def test_a_fork_is_of_its_parents_tenant(driver: Driver) -> None:
    parent, child = driver.open("many"), SessionId("child")
    driver.finish(driver.submit(parent, prompt(1, SHORT), 1))
    driver.do(Fork(driver.ticket(), parent, child))
    for seed in range(2, 60):
        driver.submit(driver.open("many"), prompt(seed, SHORT), 1)
    assert steps_until(driver, driver.submit(child, prompt(60, SHORT), 1)) > 10


def test_prompts_of_one_length_are_computed_one_after_the_other(driver: Driver) -> None:
    first, second = (driver.submit(driver.open(), prompt(seed, LONG), 1) for seed in (1, 2))
    steps_until(driver, first)
    assert not driver.tokens(second)


def test_prompts_leave_most_of_a_step_while_there_are_other_turns(model: ResolvedModel) -> None:
    driver = Driver(make_engine(model, max_step_tokens=STEP_TOKENS))
    alone = driver.submit(driver.open(), prompt(1, 4 * STEP_TOKENS), 200)
    assert steps_until(driver, alone) == 4
    beside = driver.submit(driver.open(), prompt(2, 4 * STEP_TOKENS), 1)
    assert steps_until(driver, beside) == 16


def test_the_order_changes_no_token(driver: Driver, oracle: object) -> None:
    prompts = [prompt(seed, length) for seed, length in enumerate([90, 3, 40, 17, 1, 60])]
    turns = [driver.submit(driver.open(), tokens, 5) for tokens in prompts]
    driver.finish(*turns)
    assert [driver.tokens(turn) for turn in turns] == [greedy_tokens(oracle, tokens, 5) for tokens in prompts]


def test_a_sweep_over_streamed_weights_computes_as_much_as_it_can(model: ResolvedModel, tmp_path: Path) -> None:
    engine = make_engine(model, max_step_tokens=STEP_TOKENS, weights_device=THREE_LAYERS, weights_dir=tmp_path)
    with closing(engine):
        driver = Driver(engine)
        driver.submit(driver.open(), prompt(1, 1), 40)
        driver.take(driver.engine.step())
        beside = driver.submit(driver.open(), prompt(2, 3 * (STEP_TOKENS - 1)), 1)
        assert steps_until(driver, beside) == 3
