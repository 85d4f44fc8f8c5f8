"""Forks of a paused session: each goes its own way from the same place, and pays only for what is its own."""

from __future__ import annotations

import pytest
import torch

from app.domain.breakpoints import Action, Edit, EditOp, Pass, When
from app.domain.errors import WrongState
from app.domain.values import Ticket
from app.messages import Close, Disarm, Fork
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import change_of, data_of, greedy

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(14, 5 * BLOCK + 1)
COUNT = 10
LAYER = 2
EDITS = (
    Edit(EditOp.SCALE, 0.3),
    Edit(EditOp.SCALE, 2.0),
    Edit(EditOp.ADD, 2.0, data_of(2 * vector(1, 48))),
    Edit(EditOp.ADD, -2.0, data_of(2 * vector(1, 48))),
    Edit(EditOp.REPLACE, 1.0, data_of(2 * vector(2, 48))),
    Edit(EditOp.PROJECT_OUT, 1.0, data_of(vector(3, 48))),
    Edit(EditOp.CLAMP, 9.0, data_of(vector(4, 48))),
    Edit(EditOp.ABLATE),
)


@pytest.fixture
def driver(tiny_llama: TinyModel) -> BreakDriver:
    return BreakDriver(tiny_llama.engine())


def pause(driver: BreakDriver, position: int) -> Turn:
    """A turn that is paused in the pass with this position, and has no breakpoints left."""
    session = driver.open()
    driver.arm(session, LAYER, when=When(position=position), once=True)
    turn = driver.begin(session, START, COUNT)
    driver.settle(turn)
    assert turn.paused
    return turn


def oracle_tokens(model: TinyModel, pause: tuple[int, int], *edits: Edit) -> list[int]:
    """With edits at the positions of the paused pass."""
    changes = [change_of(LAYER, edit, lambda position, _: pause[0] <= position < pause[1]) for edit in edits]
    return greedy(model.oracle, START, COUNT, changes)


@pytest.mark.parametrize("position", [0, len(START) + 3], ids=["prefill", "decode"])
def test_eight_edits_of_one_pause(driver: BreakDriver, tiny_llama: TinyModel, position: int) -> None:
    turn = pause(driver, position)
    place = turn.checkpoint.first, turn.checkpoint.end
    before = driver.owned
    children, unedited = [driver.fork(turn) for _ in EDITS], driver.fork(turn)
    assert driver.owned == before
    for child, edit in zip(children, EDITS, strict=True):
        driver.edit(child, edit)
    turns = [turn, unedited, *children]
    for each in turns:
        driver.resume(each)
    driver.settle(*turns)

    assert turn.tokens == unedited.tokens == oracle_tokens(tiny_llama, place)
    for child, edit in zip(children, EDITS, strict=True):
        assert child.tokens == oracle_tokens(tiny_llama, place, edit)
    assert len({tuple(child.tokens) for child in children}) > 2

    shared = place[0] // BLOCK
    each_has = -(-(len(START) + COUNT - 1) // BLOCK)
    assert driver.owned == shared + len(turns) * (each_has - shared)
    for each in turns:
        driver.close(each.session)
    assert driver.owned == 0


@pytest.mark.parametrize("position", [0, len(START) + 3], ids=["prefill", "decode"])
def test_what_is_done_to_the_parent_leaves_the_child_alone(
    driver: BreakDriver, tiny_llama: TinyModel, position: int
) -> None:
    turn = pause(driver, position)
    place, activation = (turn.checkpoint.first, turn.checkpoint.end), driver.read(turn)
    child, grandchild = driver.fork(turn), driver.fork(turn)
    driver.edit(turn, EDITS[0])
    assert torch.equal(driver.read(child), activation)
    driver.run(turn)
    assert turn.tokens == oracle_tokens(tiny_llama, place, EDITS[0])
    driver.do(Close(driver.ticket(), turn.session))
    driver.edit(child, EDITS[2])
    driver.cancel(grandchild)
    assert torch.equal(driver.read(driver.fork(child)), driver.read(child))
    driver.run(child)
    assert child.tokens == oracle_tokens(tiny_llama, place, EDITS[2])


def test_a_child_is_paused_in_the_same_place_with_the_same_breakpoints(
    driver: BreakDriver, tiny_llama: TinyModel
) -> None:
    session = driver.open()
    driver.arm(session, 1, when=When(Pass.DECODE))
    driver.arm(session, 3, action=Action.EDIT, edits=(EDITS[1],))
    turn = driver.begin(session, START, COUNT)
    driver.settle(turn)
    child = driver.fork(turn)
    assert torch.equal(driver.read(child), driver.read(turn))
    driver.do(Disarm(driver.ticket(), session))  # the edit of layer 3 too, which the paused pass has not reached
    pauses = driver.run(child)
    assert [pause.first for pause in pauses] == list(range(len(START), len(START) + COUNT - 1))
    assert child.tokens == greedy(tiny_llama.oracle, START, COUNT, [change_of(3, EDITS[1])])
    assert child.end.usage.completion_tokens == COUNT
    assert len(driver.run(turn)) == 1
    changes = [change_of(3, EDITS[1], lambda position, _: position < len(START))]
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, changes)


def test_a_fork_of_an_idle_session_is_steered_and_stops_as_its_parent_does(
    driver: BreakDriver, tiny_llama: TinyModel
) -> None:
    session = driver.open()
    driver.arm(session, LAYER, action=Action.EDIT, edits=(EDITS[2],))
    driver.arm(session, 1, when=When(Pass.PREFILL))
    turn = driver.begin(session, START, 4)
    driver.run(turn)
    child, history = driver.fork_idle(session), [*START, *turn.tokens, 6]
    for each in (session, child):
        again = driver.begin(each, [6], 5)
        assert len(driver.run(again)) == 1
        assert again.tokens == greedy(tiny_llama.oracle, history, 5, [change_of(LAYER, EDITS[2])])


def test_a_ticket_that_does_not_fit_the_state_is_refused(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    turn = pause(driver, 0)
    with pytest.raises(WrongState):
        driver.fork_idle(turn.session)
    driver.run(turn)
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT)
    before = driver.owned
    with pytest.raises(WrongState):
        driver.do(Fork(driver.ticket(), turn.session, driver.open(), Ticket(10_000)))
    assert driver.owned == before
