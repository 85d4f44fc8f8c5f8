"""What one process sends, the other gets: every kind of command, frame and event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.domain.activations import ActivationNorms, Captures, CheckpointInfo, PausedTurn
from app.domain.breakpoints import Edit, EditOp, Intervention, Pass, TensorData
from app.domain.errors import DjinnError, EngineError, FieldOutOfRange, SessionLimit
from app.domain.values import FinishReason, SamplingParams, SessionId, StopRule, Ticket, TokenLogprobs, TurnUsage
from app.engine_process.codec import FRAMES, MADE_LATER, VALUES, Frame, decode, encode, encode_events
from app.messages import Done, Event, Failed, Reinstate, Token, TurnFinished
from tests.engine_process.any_value import any_value

SLOW = settings(suppress_health_check=[HealthCheck.too_slow])
SENT_EVENTS = [each for each in get_args(Event) if each not in (Done, Failed)]

PAUSED = PausedTurn(
    SamplingParams(seed=1),
    StopRule(4),
    1,
    CheckpointInfo(1, 4, 5, 1, "float32", 4, Pass.DECODE, None, 0.0, 0.0),
    TensorData("float32", (1, 1), bytes(4)),
    (),
)


def seen(value: object) -> object:
    """All that a value holds, errors and fields that do not count for equality included."""
    if isinstance(value, DjinnError):
        return type(value), vars(value)
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields is not None:
        return type(value), {name: seen(getattr(value, name)) for name in fields}
    return [seen(each) for each in value] if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("kind", FRAMES.values(), ids=list(FRAMES))
@SLOW
@given(data=st.data())
def test_a_frame_comes_as_it_was_sent(kind: type[Any], data: st.DataObject) -> None:
    frame: Frame = data.draw(any_value(kind))
    assert seen(decode(encode(frame))) == seen(frame)


@SLOW
@given(data=st.data())
def test_the_events_of_a_step_come_in_their_order(data: st.DataObject) -> None:
    events = data.draw(st.lists(st.one_of(*(any_value(each) for each in SENT_EVENTS)), max_size=6))
    assert seen(decode(encode_events(events))) == seen(events)


@pytest.mark.parametrize("kind", [each for each in VALUES if each not in MADE_LATER])
@SLOW
@given(data=st.data())
def test_an_answer_keeps_its_value(kind: str, data: st.DataObject) -> None:
    value = data.draw(any_value(type(None) if VALUES[kind] is None else VALUES[kind]))
    assert seen(decode(encode_events([Done(Ticket(3), value)]))) == seen([Done(Ticket(3), value)])


def test_a_vector_of_many_interventions_is_sent_once_and_kept_once() -> None:
    """One of 64 KiB with 4,096 interventions would be 256 MiB."""
    size = 16_384
    vectors = [TensorData("float32", (size,), bytes(4 * size)) for _ in range(2)]
    edits = [Edit(EditOp.ADD, float(number), vectors[number % 2]) for number in range(64)]
    made = tuple(Intervention(at, at + 1, 1, edit) for at in range(64) for edit in edits)
    turn = TurnFinished(Ticket(1), FinishReason.LENGTH, TurnUsage(1, 0, 1, 0), 64, made)
    paused = Reinstate(Ticket(1), SessionId("ses_1"), interventions=made, paused=replace(PAUSED, interventions=made))
    frames = encode_events([turn]), encode_events([Done(Ticket(1), paused.paused)]), encode(paused)
    assert max(map(len, frames)) < 8 * size
    [back] = decode(frames[0])  # type: ignore[misc]
    assert back == turn
    assert isinstance(back, TurnFinished)
    assert len({id(each.edit.vector) for each in back.interventions or ()}) == 1
    assert len({id(each.edit) for each in back.interventions or ()}) == 64
    assert decode(frames[2]) == paused


@given(value=any_value(Captures) | any_value(ActivationNorms))
def test_what_takes_long_is_made_by_who_sends_it(value: Captures | ActivationNorms) -> None:
    [answer] = decode(encode_events([Done(Ticket(3), lambda: value)]))  # type: ignore[misc]
    assert isinstance(answer, Done)
    assert callable(answer.value)
    assert answer.value() == value


def test_an_error_keeps_its_kind_and_a_token_its_log_probabilities() -> None:
    token = Token(Ticket(9), 5, TokenLogprobs(5, -0.25, ((5, -0.25), (7, -1.5))))
    assert decode(encode_events([Token(Ticket(8), 4), token])) == [Token(Ticket(8), 4), token]
    for error in (FieldOutOfRange("no", param="layers"), SessionLimit("3 are open", retry_after_s=60)):
        [failed] = decode(encode_events([Failed(Ticket(1), error)]))  # type: ignore[misc]
        assert isinstance(failed, Failed)
        assert (type(failed.error), failed.error.body(), str(failed.error)) == (type(error), error.body(), str(error))


def test_an_error_that_only_the_engine_knows_is_an_engine_error() -> None:
    data = msgspec.msgpack.encode([("Failed", 1, ("NotHere", {"message": "lost", "param": None}))])
    [failed] = decode(data)  # type: ignore[misc]
    assert isinstance(failed, Failed)
    assert type(failed.error) is EngineError
    assert failed.error.message == "lost"
