"""Sessions that find the beginning of their context in the cache, pause after it, and then lose it."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, Pass, When
from app.domain.values import KVPolicy, Phase, SessionId
from app.messages import Disarm
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import change_of, data_of, greedy

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(16, 5 * BLOCK + 1)
FOUND = 3 * BLOCK
"""Positions that are found: the pause is just after them."""
COUNT = 9
LAYER = 1
STEERING = Edit(EditOp.ADD, 0.5, data_of(2 * vector(5, 48)))
AT_PAUSE = Edit(EditOp.ADD, 30.0, data_of(2 * vector(4, 48)))
AFTER_PREFIX = [When(Pass.PREFILL, position=FOUND + 1), When(Pass.PREFILL, token_id=START[FOUND + 1])]


@pytest.fixture
def driver(tiny_llama: TinyModel) -> BreakDriver:
    """Without lower tiers, and with room for one long session."""
    return BreakDriver(tiny_llama.engine(blocks=20))


def lose(driver: BreakDriver) -> None:
    """Run a turn that needs nearly the whole device."""
    session = driver.open()
    driver.settle(driver.begin(session, prompt(50, 70), 2))
    driver.close(session)


def steer(driver: BreakDriver, session: SessionId) -> Breakpoint:
    return driver.arm(session, 0, action=Action.EDIT, edits=(STEERING,))


def prime(driver: BreakDriver, *, steered: bool) -> None:
    """Leave the KV of the prompt in the cache."""
    session = driver.open()
    if steered:
        steer(driver, session)
    driver.settle(driver.begin(session, START, 1))
    driver.close(session)


def pause_after_prefix(driver: BreakDriver, session: SessionId, when: When = AFTER_PREFIX[0]) -> Turn:
    driver.arm(session, LAYER, when=when)
    turn = driver.begin(session, START, COUNT)
    driver.settle(turn)
    assert (turn.checkpoint.first, turn.checkpoint.end) == (FOUND, len(START))
    return turn


@pytest.mark.parametrize("when", AFTER_PREFIX, ids=["position", "token"])
@pytest.mark.parametrize("losses", [1, 2])
def test_a_prefix_that_was_found_and_lost_is_steered_once(
    driver: BreakDriver, tiny_llama: TinyModel, when: When, losses: int
) -> None:
    prime(driver, steered=True)
    session = driver.open()
    steer(driver, session)
    turn = pause_after_prefix(driver, session, when)
    lose(driver)
    driver.run(turn)
    steered = [change_of(0, STEERING)]
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, steered)
    if losses == 2:
        lose(driver)
    again, history = driver.begin(session, [9, 8, 7], 6), [*START, *turn.tokens, 9, 8, 7]
    driver.run(again)
    wanted = greedy(tiny_llama.oracle, history, 6, steered)
    assert again.tokens == wanted
    twice = change_of(0, STEERING, lambda position, _: position < FOUND)
    assert wanted != greedy(tiny_llama.oracle, history, 6, [*steered, twice])
    assert (again.end.usage.tokens_recomputed > 0) is (losses == 2)


def test_what_was_found_steered_stays_so_when_the_steering_ends_during_the_pause(
    driver: BreakDriver, tiny_llama: TinyModel
) -> None:
    prime(driver, steered=True)
    session = driver.open()
    steering = steer(driver, session)
    turn = pause_after_prefix(driver, session)
    lose(driver)
    driver.do(Disarm(driver.ticket(), session, steering.id))
    driver.run(turn)
    change = change_of(0, STEERING, lambda position, _: position < len(START))
    wanted = greedy(tiny_llama.oracle, START, COUNT, [change])
    assert turn.tokens == wanted
    assert wanted != greedy(tiny_llama.oracle, START, COUNT)
    history = [*START, *turn.tokens, 9]
    lose(driver)
    again = driver.begin(session, [9], 6)
    driver.run(again)
    assert again.tokens == greedy(tiny_llama.oracle, history, 6, [change])


def test_steering_that_ends_during_a_pause_leaves_the_cache_right_for_others(
    driver: BreakDriver, tiny_llama: TinyModel
) -> None:
    prime(driver, steered=True)
    session = driver.open()
    steering = steer(driver, session)
    turn = pause_after_prefix(driver, session)
    lose(driver)
    driver.do(Disarm(driver.ticket(), session, steering.id))
    driver.run(turn)
    for edits, longer in ((True, prompt(77, 8)), (False, prompt(78, 8))):
        other = driver.open()
        if edits:
            steer(driver, other)
        found = driver.begin(other, START + longer, COUNT)
        driver.settle(found)
        changes = [change_of(0, STEERING)] if edits else []
        assert found.tokens == greedy(tiny_llama.oracle, START + longer, COUNT, changes)


@pytest.mark.parametrize("forked", [False, True])
def test_a_breakpoint_armed_during_the_pause_is_not_met_in_what_was_found(
    tiny_llama: TinyModel, tmp_path: Path, forked: bool
) -> None:
    """A fork of a session on disk has nothing but the history."""
    driver = BreakDriver(tiny_llama.engine(host_blocks=200, policy=KVPolicy.SIGNAL, kv_dir=tmp_path))
    prime(driver, steered=False)
    turn = pause_after_prefix(driver, driver.open())
    driver.edit(turn, AT_PAUSE)
    driver.signal(turn.session, Phase.IDLE)
    driver.engine._phases.tick()
    driver.move()
    going_on = driver.fork(turn) if forked else turn
    driver.arm(going_on.session, 0, when=When(Pass.PREFILL, position=2), once=True)
    assert [pause.first for pause in driver.run(going_on)] == [FOUND]
    change = change_of(LAYER, AT_PAUSE, lambda position, _: FOUND <= position < len(START))
    assert going_on.tokens == greedy(tiny_llama.oracle, START, COUNT, [change])


def test_a_prefix_that_was_lost_is_computed_without_a_pause_in_it(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    prime(driver, steered=False)
    turn = pause_after_prefix(driver, driver.open())
    driver.edit(turn, AT_PAUSE)
    lose(driver)
    driver.arm(turn.session, 0, when=When(Pass.PREFILL, position=2), once=True)
    [only] = driver.run(turn)
    assert only.first == FOUND
    change = change_of(LAYER, AT_PAUSE, lambda position, _: FOUND <= position < len(START))
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, [change])
    assert turn.end.usage.cached_tokens == FOUND
    assert turn.end.usage.tokens_recomputed > 0
