"""What clients put in the place of a checkpoint, over and over, and at one token after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.domain.activations import PausedTurn
from app.domain.breakpoint_work import MAX_PASS_EDITS
from app.domain.breakpoints import (
    NEXT_BREAKPOINT,
    Action,
    Edit,
    EditOp,
    Intervention,
    Pass,
    Until,
    When,
)
from app.domain.errors import FieldOutOfRange
from app.messages import Disarm, ReadPaused, WriteCheckpoint
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import Change, change_of, data_of, greedy
from tests.gpu.breakpoints.breaking_replay import within

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(16, 21)
COUNT = 9
LAYER = 1
WRITTEN = 2 * vector(5, 48)
SCALE = Edit(EditOp.SCALE, 0.5)


@pytest.fixture
def driver(tiny_llama: TinyModel) -> BreakDriver:
    """With room for one long session."""
    return BreakDriver(tiny_llama.engine(blocks=20))


def pause(driver: BreakDriver, in_pass: Pass, *edits: Edit) -> Turn:
    session = driver.open()
    if edits:
        driver.arm(session, LAYER, action=Action.EDIT, edits=edits)
    driver.arm(session, LAYER, when=When(in_pass))
    turn = driver.begin(session, START, COUNT)
    driver.settle(turn)
    return turn


def write(driver: BreakDriver, turn: Turn, rows: Tensor) -> None:
    driver.do(WriteCheckpoint(driver.ticket(), turn.session, data_of(rows)))


def lose(driver: BreakDriver) -> None:
    """Run a turn that needs nearly the whole device."""
    session = driver.open()
    driver.settle(driver.begin(session, prompt(50, 70), 2))
    driver.close(session)


def interventions(driver: BreakDriver, turn: Turn) -> tuple[Intervention, ...]:
    paused = driver.do(ReadPaused(driver.ticket(), turn.session))
    assert isinstance(paused, PausedTurn)
    return paused.interventions


@pytest.mark.parametrize("lost", [False, True])
def test_the_same_row_at_one_token_after_the_other(driver: BreakDriver, tiny_llama: TinyModel, lost: bool) -> None:
    turn, tokens = pause(driver, Pass.DECODE), 4
    for _ in range(tokens):
        write(driver, turn, WRITTEN[None])
        driver.resume(turn)
        driver.settle(turn)
    if lost:
        lose(driver)
    other = driver.begin(driver.open(), prompt(8, 10), 6)
    driver.resume(turn, Until(end=True))
    driver.settle(turn, other)
    end = len(START) + tokens
    change = Change(LAYER, lambda _: WRITTEN, lambda position, _: len(START) <= position < end)
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, [change])
    assert other.tokens == greedy(tiny_llama.oracle, prompt(8, 10), 6)
    assert (turn.end.usage.tokens_recomputed > 0) is lost


@pytest.mark.parametrize("in_pass", [Pass.PREFILL, Pass.DECODE])
@pytest.mark.parametrize("steered", [False, True])
def test_only_what_was_written_last_is_kept(
    driver: BreakDriver, tiny_llama: TinyModel, in_pass: Pass, steered: bool
) -> None:
    edits = (SCALE,) if steered and in_pass is Pass.PREFILL else ()
    turn = pause(driver, in_pass, *edits)
    place = turn.checkpoint
    driver.edit(turn, SCALE)
    for seed in range(5):
        rows = torch.stack([vector(10 * seed + row, 48) for row in range(place.end - place.first)])
        write(driver, turn, rows)
    assert [(made.first, made.end) for made in interventions(driver, turn)] == [(place.first, place.end)]
    lose(driver)
    driver.run(turn, Until(end=True))
    last = iter(rows)
    steering = [change_of(LAYER, each, lambda position, _: position >= place.end) for each in edits]
    written = Change(LAYER, lambda _: next(last), lambda position, _: place.first <= position < place.end)
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, [written, *steering])


def test_what_was_written_at_other_tokens_and_layers_stays(driver: BreakDriver, tiny_llama: TinyModel) -> None:
    session = driver.open()
    driver.arm(session, 0, 2, when=When(Pass.DECODE))
    turn = driver.begin(session, START, COUNT)
    driver.settle(turn)
    changes = []
    for seed in range(4):
        place = turn.checkpoint
        for each in (seed, 40 + seed):
            write(driver, turn, vector(each, 48)[None])
        last = Edit(EditOp.REPLACE, vector=data_of(vector(40 + seed, 48)))
        changes.append(change_of(place.layer, last, within(place.first, place.end)))
        driver.resume(turn, NEXT_BREAKPOINT)
        driver.settle(turn)
    assert len(interventions(driver, turn)) == len(changes)
    assert {change.layer for change in changes} == {0, 2}
    lose(driver)
    driver.run(turn, Until(end=True))
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, changes)


def test_a_pass_that_has_been_edited_too_often_is_not_edited_any_more(
    driver: BreakDriver, tiny_llama: TinyModel
) -> None:
    turn = pause(driver, Pass.PREFILL)
    same, zero = Edit(EditOp.SCALE, 1.0), Edit(EditOp.ABLATE)
    driver.edit(turn, *[same] * (MAX_PASS_EDITS - 1))
    before, made = driver.read(turn), interventions(driver, turn)
    assert len(made) == MAX_PASS_EDITS - 1
    with pytest.raises(FieldOutOfRange, match=f"from 0 to {MAX_PASS_EDITS}") as caught:
        driver.edit(turn, zero, zero)
    assert (caught.value.status, caught.value.param) == (422, "edits")
    assert torch.equal(driver.read(turn), before)
    assert interventions(driver, turn) == made
    driver.edit(turn, same)
    with pytest.raises(FieldOutOfRange):
        driver.edit(turn, zero)
    driver.run(turn)
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT)


def test_breakpoints_do_not_edit_one_pass_for_ever(driver: BreakDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever arms others at every pause can make more edits than the breakpoints of any one moment."""
    monkeypatch.setattr("app.gpu.state.interventions.MAX_PASS_EDITS", 4)
    turn = pause(driver, Pass.PREFILL)
    driver.edit(turn, SCALE, SCALE, SCALE)
    driver.arm(turn.session, LAYER + 1, action=Action.EDIT, edits=(SCALE,) * 2)
    with pytest.raises(FieldOutOfRange, match="5 edits") as caught:
        driver.run(turn)
    assert caught.value.param == "breakpoints"
    assert "from 0 to 4" in caught.value.message


@pytest.mark.parametrize(
    ("limit", "value", "says"), [("MAX_INTERVENTIONS", 2, "3 edits"), ("MAX_INTERVENTION_BYTES", 191, "192 bytes")]
)
def test_a_turn_whose_breakpoints_edit_too_much_fails_and_the_session_goes_on_without_them(
    driver: BreakDriver, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, says: str
) -> None:
    """Its positions are no two runs that are equally far apart."""
    monkeypatch.setattr(f"app.gpu.state.interventions.{limit}", value)
    session = driver.open()
    driver.run(driver.begin(session, START, 2))
    [sequence] = driver.engine._handler.sequences
    before = list(sequence.tokens)
    add = Edit(EditOp.ADD, 0.5, data_of(vector(9, 48)))
    for position in (24, 25, 27, 30, 31):
        driver.arm(session, LAYER, action=Action.EDIT, edits=(add,), when=When(position=position))
    with pytest.raises(FieldOutOfRange, match=says) as caught:
        driver.settle(driver.begin(session, [8], COUNT))
    assert caught.value.param == "breakpoints"
    assert f"from 0 to {value}" in caught.value.message
    assert (sequence.tokens, sequence.interventions.snapshot()) == (before, ())
    driver.do(Disarm(driver.ticket(), session, None))
    assert len(driver.run(driver.begin(session, [8], 4))) == 0
    assert len(sequence.tokens) == len(before) + 5


def test_a_session_that_was_given_more_edits_than_are_taken_today_goes_on(
    driver: BreakDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal of an earlier version may have such sessions."""
    session = driver.open()
    for position in (1, 2, 4):
        driver.arm(session, LAYER, action=Action.EDIT, edits=(SCALE,), when=When(position=position))
    driver.run(driver.begin(session, START, 2))
    [sequence] = driver.engine._handler.sequences
    monkeypatch.setattr("app.gpu.state.interventions.MAX_INTERVENTIONS", len(sequence.interventions.snapshot()) - 1)
    before = len(sequence.tokens)
    driver.run(driver.begin(session, [8], 4))
    assert len(sequence.tokens) == before + 5


def test_what_a_session_keeps_of_written_activations_is_bounded(
    driver: BreakDriver, tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = pause(driver, Pass.DECODE)
    monkeypatch.setattr("app.gpu.state.interventions.MAX_INTERVENTION_BYTES", WRITTEN.nbytes)
    write(driver, turn, WRITTEN[None])
    before = driver.read(turn)
    driver.resume(turn, NEXT_BREAKPOINT)
    driver.settle(turn)
    with pytest.raises(FieldOutOfRange, match="written activations") as caught:
        write(driver, turn, WRITTEN[None])
    assert (caught.value.status, caught.value.param) == (422, "activation")
    assert torch.equal(before, WRITTEN[None])
    assert not torch.equal(driver.read(turn), WRITTEN[None])
