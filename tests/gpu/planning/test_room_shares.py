"""Which tenants' KV has the device where not all has room: who holds the most gives way to who holds less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.domain.values import KVPolicy, Ticket
from app.gpu.planning import room
from app.gpu.planning.room import SLICE_STEPS
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import Driver
from tests.gpu.oracle import greedy_tokens
from tests.gpu.tiny_engine import BLOCK, make_engine, model, oracle, prompt

__all__ = ["model", "oracle"]
pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS = 94
LONG, SHORT, ANSWER = 60 * BLOCK, 40 * BLOCK, 30
"""There is no room for both."""
STEP_TOKENS = 64


def tiered(model: ResolvedModel) -> Driver:
    return Driver(make_engine(model, BLOCKS, STEP_TOKENS, host_blocks=8 * BLOCKS, policy=KVPolicy.SIGNAL))


def pooled(model: ResolvedModel) -> Driver:
    return Driver(make_engine(model, BLOCKS, STEP_TOKENS))


def begin(driver: Driver, tenant: str, number: int, length: int, answer: int = ANSWER) -> Ticket:
    """A turn that has its first token."""
    turn = driver.submit(driver.open(tenant), prompt(number, length), answer)
    while not driver.tokens(turn):
        take_step(driver)
    return turn


def take_step(driver: Driver) -> None:
    driver.take(driver.engine.step())
    driver.move()


def is_decoding_alone(driver: Driver, turn: Ticket) -> bool:
    running = driver.engine._scheduler.queue.running.values()
    return [active.turn.ticket for active in running] == [turn]


@pytest.mark.parametrize("make", [pooled, tiered])
def test_a_turn_that_fills_the_device_gives_way_to_a_shorter_one(
    model: ResolvedModel, oracle: Any, make: Callable[[ResolvedModel], Driver]
) -> None:
    driver = make(model)
    long = begin(driver, "long", 0, LONG)
    short = driver.submit(driver.open("short"), prompt(1, SHORT), 2)
    steps = 0
    while not driver.ended(short):
        take_step(driver)
        steps += 1
    assert not driver.ended(long)
    assert steps <= SLICE_STEPS + 2 * SHORT // (STEP_TOKENS // 4) + 4  # its prompt has each second step
    driver.finish(long)
    assert driver.tokens(long) == greedy_tokens(oracle, prompt(0, LONG), ANSWER)


def test_no_step_follows_before_the_only_turn_of_a_tenant_has_given_way(
    model: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is planned: else the one that waits would wait until something else happens."""
    monkeypatch.setattr(room, "SLICE_STEPS", 12)
    driver = pooled(model)
    long = begin(driver, "long", 0, LONG)
    short = driver.submit(driver.open("short"), prompt(1, SHORT), 2)
    planned = 0
    while driver.memory().running and not driver.tokens(short):
        take_step(driver)
        assert driver.engine._outdated or not is_decoding_alone(driver, long)
        planned += is_decoding_alone(driver, long)
    assert planned >= 2
    driver.finish(long, short)


@pytest.mark.parametrize("make", [pooled, tiered])
def test_short_turns_without_end_keep_no_longer_one_out(
    model: ResolvedModel, oracle: Any, make: Callable[[ResolvedModel], Driver]
) -> None:
    driver = make(model)
    long = driver.submit(driver.open("long"), prompt(0, LONG), ANSWER)
    short, steps, ended = list[Ticket](), 0, 0
    while not driver.ended(long):
        ended += sum(map(driver.ended, short))
        short = [turn for turn in short if not driver.ended(turn)]
        while len(short) < 2:
            short.append(driver.submit(driver.open("short"), prompt(steps + len(short), SHORT // 2), 4))
        take_step(driver)
        steps += 1
        assert steps < 2000
    assert ended > 2
    assert driver.tokens(long) == greedy_tokens(oracle, prompt(0, LONG), ANSWER)


def test_the_only_turn_of_a_tenant_stays_for_one_that_has_a_turn_too(model: ResolvedModel) -> None:
    driver = pooled(model)
    long = begin(driver, "long", 0, LONG)
    first = begin(driver, "short", 1, SHORT // 4, answer=60)
    second = driver.submit(driver.open("short"), prompt(2, SHORT // 2), 2)
    while not driver.ended(long):
        take_step(driver)
        assert not driver.tokens(second)
    assert driver.end(long).usage.tokens_recomputed == 0
    driver.finish(first, second)


def test_within_a_tenant_nothing_gives_way(model: ResolvedModel) -> None:
    driver = pooled(model)
    long = begin(driver, "one", 0, LONG)
    short = driver.submit(driver.open("one"), prompt(1, SHORT), 2)
    while not driver.ended(long):
        take_step(driver)
        assert not driver.tokens(short)
    driver.finish(short)


def test_nobody_gives_way_in_vain(model: ResolvedModel) -> None:
    """Two turns share nearly all of their KV: the younger one's would make no room for another tenant's second turn."""
    driver = pooled(model)
    first = begin(driver, "long", 0, LONG)
    shared = list(prompt(0, LONG))
    second = driver.submit(driver.open("long"), [*shared[:-BLOCK], *prompt(5, BLOCK)], ANSWER)
    own = driver.submit(driver.open("short"), prompt(1, 2 * BLOCK), ANSWER)
    while not (driver.tokens(second) and driver.tokens(own)):
        take_step(driver)
    other = driver.submit(driver.open("short"), prompt(2, SHORT), 2)
    while not driver.ended(first):
        take_step(driver)
        running = [active.turn.ticket for active in driver.engine._scheduler.queue.running.values()]
        assert second in running or driver.ended(second)
    driver.finish(second, own, other)
