"""Which tenants' turns run where not all can: one with fewer is not kept out by one with more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.domain.values import KVPolicy, Ticket
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import Driver
from tests.gpu.oracle import greedy_tokens
from tests.gpu.tiny_engine import BLOCK, driver, make_engine, model, oracle, prompt

__all__ = ["driver", "model", "oracle"]
pytestmark = pytest.mark.usefixtures("one_thread")

MAX_RUNNING = 8
LENGTH, ANSWER = 16 * BLOCK, 30
BLOCKS = 4 * (LENGTH + ANSWER) // BLOCK
"""Room for four such turns."""


def long_turns(driver: Driver, tenant: str, count: int, first: int, length: int = LENGTH) -> list[Ticket]:
    return [driver.submit(driver.open(tenant), prompt(first + number, length), ANSWER) for number in range(count)]


def begin(driver: Driver, turns: list[Ticket], count: int) -> None:
    """Step until so many of the turns run."""
    while sum(bool(driver.tokens(turn)) for turn in turns) < count:
        take_step(driver)


def take_step(driver: Driver) -> None:
    driver.take(driver.engine.step())
    driver.move()


def tiered(model: ResolvedModel) -> Driver:
    return Driver(make_engine(model, BLOCKS, 512, host_blocks=8 * BLOCKS, policy=KVPolicy.SIGNAL))


def pooled(model: ResolvedModel) -> Driver:
    return Driver(make_engine(model, BLOCKS, 512))


def test_a_tenant_that_fills_the_step_lets_another_in(driver: Driver) -> None:
    many = long_turns(driver, "many", 3 * MAX_RUNNING, 0, length=3)
    begin(driver, many, MAX_RUNNING)
    one = driver.submit(driver.open("one"), prompt(100, 3), 2)
    for _ in range(4):
        take_step(driver)
    assert driver.ended(one)
    assert not any(driver.ended(turn) for turn in many)
    driver.finish(*many)


def test_no_more_turns_run_than_may_while_tenants_change_places(driver: Driver) -> None:
    turns = long_turns(driver, "many", 2 * MAX_RUNNING, 0, length=3)
    begin(driver, turns, MAX_RUNNING)
    turns += [turn for number in range(4) for turn in long_turns(driver, f"tenant {number}", 3, 20 + number, length=3)]
    while not all(map(driver.ended, turns)):
        take_step(driver)
        assert driver.memory().running <= MAX_RUNNING


def test_tenants_come_to_run_as_many_turns_as_each_other(model: ResolvedModel) -> None:
    """Without drafts, which depend on the clock: a turn that ends early gives its place to another."""
    driver = Driver(make_engine(model, max_draft_tokens=0))
    many = long_turns(driver, "many", MAX_RUNNING, 0, length=3)
    begin(driver, many, MAX_RUNNING)
    few = long_turns(driver, "few", MAX_RUNNING, 20, length=3)
    before = {turn: len(driver.tokens(turn)) for turn in (*many, *few)}
    for _ in range(30):
        take_step(driver)
    gained = [sum(len(driver.tokens(turn)) > before[turn] + 15 for turn in turns) for turns in (many, few)]
    assert gained == [MAX_RUNNING // 2, MAX_RUNNING // 2]


@pytest.mark.parametrize("make", [tiered, pooled])
def test_a_tenant_whose_kv_fills_the_device_lets_another_in(
    model: ResolvedModel, oracle: object, make: Callable[[ResolvedModel], Driver]
) -> None:
    driver = make(model)
    many = long_turns(driver, "many", 6, 0)
    begin(driver, many, 4)
    one = driver.submit(driver.open("one"), prompt(100, LENGTH), 2)
    for _ in range(8):
        take_step(driver)
    assert driver.ended(one)
    assert not any(driver.ended(turn) for turn in many)
    driver.finish(*many)
    expected = [greedy_tokens(oracle, prompt(number, LENGTH), ANSWER) for number in range(6)]
    assert [driver.tokens(turn) for turn in many] == expected


def test_turns_of_one_tenant_take_nothing_from_each_other(driver: Driver) -> None:
    first = long_turns(driver, "many", MAX_RUNNING, 0, length=3)
    begin(driver, first, MAX_RUNNING)
    late = driver.submit(driver.open("many"), prompt(100, 3), 2)
    while not any(map(driver.ended, first)):
        take_step(driver)
        assert not driver.tokens(late)


def test_kv_that_is_guaranteed_stays(model: ResolvedModel) -> None:
    driver = tiered(model)
    sessions = [driver.open("many") for _ in range(4)]
    for sequence in driver.engine._handler.sequences:
        sequence.guaranteed = True
    many = [driver.submit(session, prompt(number, LENGTH), ANSWER) for number, session in enumerate(sessions)]
    begin(driver, many, 4)
    one = driver.submit(driver.open("one"), prompt(100, 2 * LENGTH), 2)
    while not any(map(driver.ended, many)):
        take_step(driver)
        assert not driver.tokens(one)


@pytest.mark.parametrize("make", [pooled, tiered])
def test_turns_that_grow_do_not_push_out_another_tenants(
    model: ResolvedModel, make: Callable[[ResolvedModel], Driver]
) -> None:
    """The device has room for their contexts, and not for their answers."""
    driver = make(model)
    many = long_turns(driver, "many", MAX_RUNNING - 1, 0, length=LENGTH // 2)
    begin(driver, many, MAX_RUNNING - 1)
    one = driver.submit(driver.open("one"), prompt(100, 2 * BLOCK), ANSWER)
    steps = 0
    while not driver.ended(one):
        take_step(driver)
        steps += 1
    assert steps <= ANSWER + 4
    assert driver.end(one).usage.tokens_recomputed == 0
    driver.finish(*many)


def test_a_tenant_with_many_turns_does_not_make_the_steps_of_another_long(driver: Driver) -> None:
    """Each of the many has its place in some of the steps."""
    driver.engine._scheduler.shared.rows = 2
    many = long_turns(driver, "many", MAX_RUNNING - 1, 0, length=3)
    one = driver.submit(driver.open("one"), prompt(100, 3), ANSWER)
    begin(driver, [*many, one], MAX_RUNNING)
    before = {turn: len(driver.tokens(turn)) for turn in (*many, one)}
    steps = MAX_RUNNING
    for _ in range(steps):
        take_step(driver)
    gained = {turn: len(driver.tokens(turn)) - count for turn, count in before.items()}
    assert gained[one] >= steps
    assert sum(gained[turn] for turn in many) <= 4 * steps  # two rows, and drafts
    assert min(gained[turn] for turn in many) >= steps * 2 // len(many) - 1
    driver.finish(*many, one)


def test_alone_a_tenant_has_all_rows(driver: Driver) -> None:
    driver.engine._scheduler.shared.rows = 2
    many = long_turns(driver, "many", MAX_RUNNING, 0, length=3)
    begin(driver, many, MAX_RUNNING)
    before = sum(len(driver.tokens(turn)) for turn in many)
    take_step(driver)
    assert sum(len(driver.tokens(turn)) for turn in many) - before >= MAX_RUNNING
    driver.finish(*many)
