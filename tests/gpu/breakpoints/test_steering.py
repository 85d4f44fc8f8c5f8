"""Edits that stay with a session: never in anybody else's KV, and there again whenever KV is recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.domain.breakpoints import ALL, Action, Breakpoint, Edit, EditOp, Pass, Positions, When
from app.domain.values import KVPolicy, Phase, SessionId
from app.messages import Rewind
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import Where, change_of, data_of, everywhere, greedy, within

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(12, 5 * BLOCK + 2)
SHARED = 5 * BLOCK
COUNT = 6
LAYER = 1
ADD = Edit(EditOp.ADD, 2.0, data_of(2 * vector(3, 48)))
SCALE = Edit(EditOp.SCALE, 0.5)


@pytest.fixture
def driver(tiny_llama: TinyModel) -> BreakDriver:
    return BreakDriver(tiny_llama.engine())


@pytest.fixture
def small(tiny_llama: TinyModel) -> BreakDriver:
    """Without lower tiers, and with room for one long session."""
    return BreakDriver(tiny_llama.engine(blocks=20))


def steered_session(driver: BreakDriver, *edits: Edit, when: When = When()) -> SessionId:  # noqa: B008 (frozen)
    return driver.open_armed(LAYER, action=Action.EDIT, edits=edits, when=when) if edits else driver.open()


def oracle_tokens(model: TinyModel, history: list[int], *edits: Edit, where: Where = everywhere) -> list[int]:
    return greedy(model.oracle, history, COUNT, [change_of(LAYER, edit, where) for edit in edits])


@pytest.mark.parametrize("first_is_steered", [True, False])
@pytest.mark.parametrize("positions", [ALL, Positions(2 * BLOCK, 2 * BLOCK + 1), Positions(4 * BLOCK)])
def test_steered_and_unsteered_sessions_share_what_is_the_same_and_nothing_else(
    driver: BreakDriver, tiny_llama: TinyModel, positions: Positions, first_is_steered: bool
) -> None:
    edit = Edit(ADD.op, ADD.factor, ADD.vector, positions)
    steering: list[tuple[Edit, ...]] = [(), (edit,)]
    end = len(START) + COUNT if positions.end is None else positions.end
    found = []
    for edits in reversed(steering) if first_is_steered else steering:
        turn = driver.turn(steered_session(driver, *edits), START, COUNT)
        assert turn.tokens == oracle_tokens(tiny_llama, START, *edits, where=within(positions.first, end))
        found.append(turn.end.usage.cached_tokens)
    assert found == [0, positions.first]


def test_the_same_steering_shares_and_other_steering_does_not(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    weaker = Edit(ADD.op, 1.5, ADD.vector)
    elsewhere = Edit(ADD.op, ADD.factor, data_of(2 * vector(4, 48)))
    guarded = Edit(ADD.op, ADD.factor, ADD.vector, max_norm=3.0)
    cached = []
    for edits in [(ADD,), (ADD,), (weaker,), (elsewhere,), (guarded,), (ADD, SCALE), (SCALE, ADD), (SCALE, ADD)]:
        turn = driver.turn(steered_session(driver, *edits), START, COUNT)
        assert turn.tokens == oracle_tokens(tiny_llama, START, *edits)
        cached.append(turn.end.usage.cached_tokens)
    assert cached == [0, SHARED, 0, 0, 0, 0, 0, SHARED]


def test_the_same_edit_at_another_layer_is_another_steering(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    for layer in (0, 1, 2):
        session = driver.open_armed(layer, action=Action.EDIT, edits=(ADD,))
        turn = driver.turn(session, START, COUNT)
        assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, [change_of(layer, ADD)])
        assert turn.end.usage.cached_tokens == 0


def test_an_edit_made_at_a_pause_is_not_shared(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    session = driver.open_armed(LAYER, when=When(Pass.PREFILL))
    turn = driver.turn(session, START, COUNT)
    driver.edit(turn, Edit(ADD.op, ADD.factor, ADD.vector, Positions(2 * BLOCK)))
    driver.run(turn)
    assert turn.tokens == oracle_tokens(tiny_llama, START, ADD, where=within(2 * BLOCK, len(START)))
    plain = driver.turn(driver.open(), START, COUNT)
    assert plain.tokens == oracle_tokens(tiny_llama, START)
    assert plain.end.usage.cached_tokens == 2 * BLOCK


def test_what_comes_after_the_steering_is_not_shared_either(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    """Later blocks have attended to steered ones, though nothing was done to them."""
    session = driver.open_armed(LAYER, action=Action.EDIT, edits=(ADD,), when=When(position=0))
    history = START + driver.turn(session, START, COUNT).tokens
    again = driver.turn(driver.open(), [*history, 5], COUNT)
    assert again.end.usage.cached_tokens == 0
    assert again.tokens == oracle_tokens(tiny_llama, [*history, 5])


def test_steering_stays_over_turns_and_ends_with_its_breakpoint(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    session, history = steered_session(driver, ADD), list(START)
    first = driver.turn(session, START, COUNT)
    history += [*first.tokens, 9, 8]
    second = driver.turn(session, [9, 8], COUNT)
    assert second.tokens == oracle_tokens(tiny_llama, history, ADD)
    history += second.tokens
    steered = len(history) - 1  # the last token has not been computed yet
    driver.disarm(session)
    third = driver.turn(session, [7], COUNT)
    assert third.tokens == oracle_tokens(tiny_llama, [*history, 7], ADD, where=within(0, steered))
    assert third.end.usage.tokens_recomputed == 0


@pytest.mark.parametrize("cut", [SHARED + 2, SHARED, SHARED - 3, 1])
def test_a_rewind_into_the_steering_keeps_what_is_left_of_it(
    driver: BreakDriver, tiny_llama: TinyModel, cut: int
) -> None:
    session = steered_session(driver, ADD)
    driver.turn(session, START, COUNT)
    driver.disarm(session)
    driver.do(Rewind(driver.ticket(), session, cut))
    turn = driver.turn(session, [7], COUNT)
    assert turn.tokens == oracle_tokens(tiny_llama, [*START[:cut], 7], ADD, where=within(0, cut))


FOUND = 3 * BLOCK
"""Positions that a session finds in the cache: it pauses just after them, and then loses them."""
STEERING = Edit(EditOp.ADD, 0.5, data_of(2 * vector(5, 48)))
AT_PAUSE = Edit(EditOp.ADD, 30.0, data_of(2 * vector(4, 48)))
PROMPT = prompt(16, 5 * BLOCK + 1)
AFTER_PREFIX = [When(Pass.PREFILL, position=FOUND + 1), When(Pass.PREFILL, token_id=PROMPT[FOUND + 1])]


def steer(driver: BreakDriver, session: SessionId) -> Breakpoint:
    return driver.arm(session, 0, action=Action.EDIT, edits=(STEERING,))


def pause_after_prefix(
    driver: BreakDriver, *, steered: bool, when: When = AFTER_PREFIX[0]
) -> tuple[Turn, Breakpoint | None]:
    """A session that finds what another one has left in the cache, and its steering."""
    first, session = driver.open(), driver.open()
    if steered:
        steer(driver, first)
    driver.turn(first, PROMPT, 1)
    driver.close(first)
    steering = steer(driver, session) if steered else None
    driver.arm(session, LAYER, when=when)
    turn = driver.turn(session, PROMPT, COUNT)
    assert (turn.checkpoint.first, turn.checkpoint.end) == (FOUND, len(PROMPT))
    return turn, steering


@pytest.mark.parametrize("when", AFTER_PREFIX, ids=["position", "token"])
@pytest.mark.parametrize("losses", [1, 2])
def test_a_prefix_that_was_found_and_lost_is_steered_once(
    small: BreakDriver, tiny_llama: TinyModel, when: When, losses: int
) -> None:
    turn, _ = pause_after_prefix(small, steered=True, when=when)
    small.fill()
    small.run(turn)
    steered = [change_of(0, STEERING)]
    assert turn.tokens == greedy(tiny_llama.oracle, PROMPT, COUNT, steered)
    if losses == 2:
        small.fill()
    again, history = small.begin(turn.session, [9, 8, 7], 6), [*PROMPT, *turn.tokens, 9, 8, 7]
    small.run(again)
    wanted = greedy(tiny_llama.oracle, history, 6, steered)
    assert again.tokens == wanted
    twice = change_of(0, STEERING, within(0, FOUND))
    assert wanted != greedy(tiny_llama.oracle, history, 6, [*steered, twice])
    assert (again.end.usage.tokens_recomputed > 0) is (losses == 2)


@pytest.mark.parametrize("goes", ["to disk", "to disk, and is forked there", "nowhere, and is lost"])
def test_a_breakpoint_armed_during_the_pause_is_not_met_in_what_was_found(
    tiny_llama: TinyModel, tmp_path: Path, goes: str
) -> None:
    """A fork of a session on disk has nothing but the history."""
    lost = goes == "nowhere, and is lost"
    tiers: dict[str, Any] = {"host_blocks": 200, "policy": KVPolicy.SIGNAL, "kv_dir": tmp_path}
    driver = BreakDriver(tiny_llama.engine(**({"blocks": 20} if lost else tiers)))
    turn, _ = pause_after_prefix(driver, steered=False)
    driver.edit(turn, AT_PAUSE)
    if lost:
        driver.fill()
    else:
        driver.signal(turn.session, Phase.IDLE)
        driver.advance()
    going_on = driver.fork(turn) if "forked" in goes else turn
    driver.arm(going_on.session, 0, when=When(Pass.PREFILL, position=2), once=True)
    assert [pause.first for pause in driver.run(going_on)] == [FOUND]
    change = change_of(LAYER, AT_PAUSE, within(FOUND, len(PROMPT)))
    assert going_on.tokens == greedy(tiny_llama.oracle, PROMPT, COUNT, [change])
    assert going_on.end.usage.cached_tokens == FOUND
    assert (going_on.end.usage.tokens_recomputed > 0) is lost
