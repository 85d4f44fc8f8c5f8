"""Edits that stay with a session: never in anybody else's KV, and there again whenever KV is recomputed."""

from __future__ import annotations

import pytest

from app.domain.breakpoints import ALL, Action, Edit, EditOp, Pass, Positions, When
from app.domain.values import SessionId
from app.messages import Close, Disarm, Open, Rewind
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import Where, change_of, data_of, everywhere, greedy

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


def steered_session(driver: BreakDriver, *edits: Edit, when: When | None = None) -> SessionId:
    session = driver.open()
    if edits:
        driver.arm(session, LAYER, action=Action.EDIT, edits=edits, when=when or When())
    return session


def turn_of(driver: BreakDriver, session: SessionId, token_ids: list[int], count: int = COUNT) -> Turn:
    turn = driver.begin(session, token_ids, count)
    driver.settle(turn)
    return turn


def oracle_tokens(
    model: TinyModel, history: list[int], *edits: Edit, where: Where = everywhere, count: int = COUNT
) -> list[int]:
    return greedy(model.oracle, history, count, [change_of(LAYER, edit, where) for edit in edits])


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
        turn = turn_of(driver, steered_session(driver, *edits), START)
        where: Where = lambda position, _: positions.first <= position < end  # noqa: E731
        assert turn.tokens == oracle_tokens(tiny_llama, START, *edits, where=where)
        found.append(turn.end.usage.cached_tokens)
    assert found == [0, positions.first]


def test_the_same_steering_shares_and_other_steering_does_not(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    weaker = Edit(ADD.op, 1.5, ADD.vector)
    elsewhere = Edit(ADD.op, ADD.factor, data_of(2 * vector(4, 48)))
    guarded = Edit(ADD.op, ADD.factor, ADD.vector, max_norm=3.0)
    cached = []
    for edits in [(ADD,), (ADD,), (weaker,), (elsewhere,), (guarded,), (ADD, SCALE), (SCALE, ADD), (SCALE, ADD)]:
        turn = turn_of(driver, steered_session(driver, *edits), START)
        assert turn.tokens == oracle_tokens(tiny_llama, START, *edits)
        cached.append(turn.end.usage.cached_tokens)
    assert cached == [0, SHARED, 0, 0, 0, 0, 0, SHARED]


def test_the_same_edit_at_another_layer_is_another_steering(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    for layer in (0, 1, 2):
        session = driver.open()
        driver.arm(session, layer, action=Action.EDIT, edits=(ADD,))
        turn = turn_of(driver, session, START)
        assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, [change_of(layer, ADD)])
        assert turn.end.usage.cached_tokens == 0


def test_an_edit_made_at_a_pause_is_not_shared(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    session = driver.open()
    driver.arm(session, LAYER, when=When(Pass.PREFILL))
    turn = turn_of(driver, session, START)
    driver.edit(turn, Edit(ADD.op, ADD.factor, ADD.vector, Positions(2 * BLOCK)))
    driver.run(turn)
    where: Where = lambda position, _: 2 * BLOCK <= position < len(START)  # noqa: E731
    assert turn.tokens == oracle_tokens(tiny_llama, START, ADD, where=where)
    plain = turn_of(driver, driver.open(), START)
    assert plain.tokens == oracle_tokens(tiny_llama, START)
    assert plain.end.usage.cached_tokens == 2 * BLOCK


def test_what_comes_after_the_steering_is_not_shared_either(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    """Later blocks have attended to steered ones, though nothing was done to them."""
    session = driver.open()
    driver.arm(session, LAYER, action=Action.EDIT, edits=(ADD,), when=When(position=0))
    history = START + turn_of(driver, session, START).tokens
    again = turn_of(driver, driver.open(), [*history, 5])
    assert again.end.usage.cached_tokens == 0
    assert again.tokens == oracle_tokens(tiny_llama, [*history, 5])


def test_steering_stays_over_turns_and_ends_with_its_breakpoint(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    session, history = steered_session(driver, ADD), list(START)
    first = turn_of(driver, session, START)
    history += [*first.tokens, 9, 8]
    second = turn_of(driver, session, [9, 8])
    assert second.tokens == oracle_tokens(tiny_llama, history, ADD)
    history += second.tokens
    steered = len(history) - 1  # the last token has not been computed yet
    driver.do(Disarm(driver.ticket(), session))
    third = turn_of(driver, session, [7])
    wanted = oracle_tokens(tiny_llama, [*history, 7], ADD, where=lambda position, _: position < steered)
    assert third.tokens == wanted
    assert third.end.usage.tokens_recomputed == 0


def test_a_rewind_takes_the_steering_of_what_it_drops(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    session = steered_session(driver, ADD, when=When(Pass.DECODE))
    turn_of(driver, session, START)
    driver.do(Disarm(driver.ticket(), session))
    driver.do(Rewind(driver.ticket(), session, len(START)))
    turn = turn_of(driver, session, [7])
    assert turn.tokens == oracle_tokens(tiny_llama, [*START, 7])
    assert not turn.end.interventions
    shared = turn_of(driver, driver.open(), [*START, 7, *turn.tokens])
    assert shared.end.usage.cached_tokens == (len(START) + COUNT) // BLOCK * BLOCK


@pytest.mark.parametrize("cut", [SHARED + 2, SHARED, SHARED - 3, 1])
def test_a_rewind_into_the_steering_keeps_what_is_left_of_it(
    driver: BreakDriver, tiny_llama: TinyModel, cut: int
) -> None:
    session = steered_session(driver, ADD)
    turn_of(driver, session, START)
    driver.do(Disarm(driver.ticket(), session))
    driver.do(Rewind(driver.ticket(), session, cut))
    turn = turn_of(driver, session, [7])
    wanted = oracle_tokens(tiny_llama, [*START[:cut], 7], ADD, where=lambda position, _: position < cut)
    assert turn.tokens == wanted


def test_steered_kv_that_is_lost_is_computed_as_it_was(tiny_llama: TinyModel) -> None:
    driver = BreakDriver(tiny_llama.engine(blocks=20))
    session, history = steered_session(driver, ADD, when=When(every=3)), list(START)
    first = turn_of(driver, session, START)
    driver.do(Disarm(driver.ticket(), session))
    history += [*first.tokens, 7]
    turn_of(driver, driver.open(), prompt(40, 70))
    assert driver.place(session).computed_tokens == 0
    second = turn_of(driver, session, [7])
    steered = len(history) - 2
    where: Where = lambda position, _: position % 3 == 0 and position < steered  # noqa: E731
    assert second.tokens == oracle_tokens(tiny_llama, history, ADD, where=where)
    assert second.end.usage.tokens_recomputed > 0


def test_a_session_opened_again_with_its_interventions_goes_on_as_it_was(
    driver: BreakDriver, tiny_llama: TinyModel
) -> None:
    session = steered_session(driver, ADD, SCALE, when=When(Pass.DECODE))
    first = turn_of(driver, session, START)
    made = first.end.interventions
    assert made
    driver.do(Close(driver.ticket(), session))
    restarted, again = BreakDriver(tiny_llama.engine()), SessionId("again")
    history = START + first.tokens
    restarted.do(Open(restarted.ticket(), again, token_ids=tuple(history), interventions=made))
    turn = turn_of(restarted, again, [7])
    where: Where = lambda position, _: len(START) <= position < len(history) - 1  # noqa: E731
    assert turn.tokens == oracle_tokens(tiny_llama, [*history, 7], ADD, SCALE, where=where)
    assert turn.end.interventions is None  # as they were
