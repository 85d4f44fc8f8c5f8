"""What one process sends, the other gets: frames whole and in order, with every kind of command and event in them."""

import dataclasses
import functools
import os
import resource
import socket
import threading
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.domain.activations import Activation, ActivationNorms, Captures, CheckpointInfo, PausedTurn
from app.domain.breakpoints import Edit, EditOp, Intervention, Pass, TensorData
from app.domain.errors import ContextTooLong, DjinnError, EngineError, FieldOutOfRange, SessionLimit
from app.domain.values import FinishReason, SamplingParams, SessionId, StopRule, Ticket, TokenLogprobs, TurnUsage
from app.engine_process.channel import SHARED_BYTES, Channel, Closed
from app.engine_process.frames import FRAMES, VALUES, Frame, decode, encode, encode_events
from app.messages import Done, Event, Failed, Reinstate, Token, TurnFinished

SECONDS = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    pair = socket.socketpair()
    one, other = (Channel(end) for end in pair)
    yield one, other
    one.close()
    other.close()


def shared_memory() -> int:
    """Open descriptors of it. Servers on threads of these tests open and close others."""
    return sum("/memfd:" in os.path.realpath(f"/dev/fd/{each}") for each in os.listdir("/dev/fd"))


def test_both_ends_can_send_more_than_the_socket_holds_before_either_reads(ends: tuple[Channel, Channel]) -> None:
    frame = bytes(20 << 20)
    for end in ends:
        end.send(frame)
    assert [end.receive(SECONDS) for end in ends] == [frame, frame]


@given(sizes=st.lists(st.integers(0, 3 * SHARED_BYTES), max_size=12))
def test_frames_keep_their_order(sizes: list[int]) -> None:
    pair = socket.socketpair()
    one, other = (Channel(end) for end in pair)
    sent = [number.to_bytes(2, "big") + bytes(size) for number, size in enumerate(sizes)]
    for frame in sent:
        one.send(frame)
    assert [other.receive(SECONDS) for _ in sent] == sent
    one.close()
    other.close()


def test_a_small_frame_does_not_wait_until_large_ones_are_read(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    large = [bytes([number % 256]) * (2 * SHARED_BYTES) for number in range(300)]
    for _ in range(3):
        before = shared_memory()
        for frame in large:
            one.send(frame)
        one.send(b"token")
        assert [other.receive(SECONDS) for _ in range(301)] == [*large, b"token"]
        assert shared_memory() == before


@pytest.mark.parametrize("free", [0, 1])
def test_frames_come_while_descriptors_are_short(ends: tuple[Channel, Channel], free: int) -> None:
    one, other = ends
    large = [bytes([number]) * (2 * SHARED_BYTES) for number in range(4)]
    for frame in large[:3]:
        one.send(frame)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, hard))
    try:
        received = [other.receive(SECONDS) for _ in range(3)]
        one.send(large[3])
        received.append(other.receive(SECONDS))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert received == large


def test_an_end_that_closes_keeps_no_descriptor() -> None:
    before = shared_memory()
    one, other = map(Channel, socket.socketpair())
    for size in (*[SHARED_BYTES] * 64, 2 * SHARED_BYTES):  # the last waits for room
        one.send(bytes(size))
    one.close()
    other.close()
    assert shared_memory() == before


def test_frames_of_several_threads_do_not_mix(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    threads, frames = 4, 400

    def send(number: int) -> None:
        for count in range(frames):
            one.send(bytes([number]) * (1 + 997 * (count % 50)) + count.to_bytes(2, "big"))

    senders = [threading.Thread(target=send, args=(number,)) for number in range(threads)]
    for sender in senders:
        sender.start()
    counts = [0] * threads
    for _ in range(threads * frames):
        frame = other.receive(SECONDS)
        assert frame is not None
        number, count = frame[0], int.from_bytes(frame[-2:], "big")
        assert set(frame[:-2]) == {number}
        assert count == counts[number]  # the order of each thread
        counts[number] += 1
    assert counts == [frames] * threads


def test_what_was_sent_before_the_end_still_comes(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    assert other.receive(0.01) is None, "nothing comes in time"
    one.send(b"last")
    one.close()
    assert other.receive(SECONDS) == b"last"
    with pytest.raises(Closed):
        other.receive(SECONDS)
    other.send(b"nobody")  # is no error: `receive` has told of the end


NUMBERS = st.integers(-(2**31), 2**31)
ERRORS = FieldOutOfRange("too large", param="layers"), SessionLimit("no more", retry_after_s=60), ContextTooLong("ü")
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: NUMBERS,
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    Path: st.text("abc/.", min_size=1, max_size=8).map(Path),
    type(None): st.none(),
    DjinnError: st.sampled_from(ERRORS),
}
DEPTH = 2


def any_value(kind: Any) -> st.SearchStrategy[Any]:
    """Values of `kind`; types that contain themselves end after a few levels."""
    return _any_value(kind, 0)


@functools.cache
def _any_value(kind: Any, depth: int) -> st.SearchStrategy[Any]:
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, typing.NewType):
        return _any_value(kind.__supertype__, depth)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{each.name: _any_value(hints[each.name], depth) for each in dataclasses.fields(kind)})
    if isinstance(kind, type) and issubclass(kind, tuple | msgspec.Struct):  # a NamedTuple
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: _any_value(each, depth) for name, each in hints.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(_any_value(each, depth) for each in arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is not ...:
        return st.tuples(*(_any_value(each, depth) for each in arguments))
    if depth >= DEPTH:
        return st.just({} if origin is Mapping else origin(()))
    if origin is tuple:
        return st.lists(_any_value(arguments[0], depth + 1), max_size=3).map(tuple)
    if origin is frozenset:
        return st.frozensets(_any_value(arguments[0], depth + 1), max_size=3)
    assert origin is Mapping, kind
    return st.dictionaries(*(_any_value(each, depth + 1) for each in arguments), max_size=3)


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
    fields = getattr(type(value), "__dataclass_fields__", getattr(type(value), "__struct_fields__", None))
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
    assert seen(decode(b"".join(encode_events(events)))) == seen(events)


@pytest.mark.parametrize("kind", VALUES)
@SLOW
@given(data=st.data())
def test_an_answer_keeps_its_value(kind: str, data: st.DataObject) -> None:
    value = data.draw(any_value(type(None) if VALUES[kind] is None else VALUES[kind]))
    assert seen(decode(b"".join(encode_events([Done(Ticket(3), value)])))) == seen([Done(Ticket(3), value)])


def test_a_vector_of_many_interventions_is_sent_once_and_kept_once() -> None:
    """One of 64 KiB with 4,096 interventions would be 256 MiB."""
    size = 16_384
    vectors = [TensorData("float32", (size,), bytes(4 * size)) for _ in range(2)]
    edits = [Edit(EditOp.ADD, float(number), vectors[number % 2]) for number in range(64)]
    made = tuple(Intervention(at, at + 1, 1, edit) for at in range(64) for edit in edits)
    turn = TurnFinished(Ticket(1), FinishReason.LENGTH, TurnUsage(1, 0, 1, 0), 64, made)
    paused = Reinstate(Ticket(1), SessionId("ses_1"), interventions=made, paused=replace(PAUSED, interventions=made))
    frames = *map(b"".join, (encode_events([turn]), encode_events([Done(Ticket(1), paused.paused)]))), encode(paused)
    assert max(map(len, frames)) < 8 * size
    [back] = decode(frames[0])  # type: ignore[misc]
    assert back == turn
    assert isinstance(back, TurnFinished)
    assert len({id(each.edit.tensors[0].data) for each in back.interventions or ()}) == 1
    assert len({id(each.edit) for each in back.interventions or ()}) == 64
    assert decode(frames[2]) == paused


@given(value=any_value(Captures) | any_value(ActivationNorms) | any_value(Activation))
def test_what_takes_long_is_made_by_who_sends_it(value: Captures | ActivationNorms | Activation) -> None:
    [answer] = decode(b"".join(encode_events([Done(Ticket(3), lambda: value)])))  # type: ignore[misc]
    assert isinstance(answer, Done)
    assert callable(answer.value)
    assert answer.value() == value


def test_an_error_keeps_its_kind_and_a_token_its_log_probabilities() -> None:
    token = Token(Ticket(9), 5, TokenLogprobs(5, -0.25, ((5, -0.25), (7, -1.5))))
    assert decode(b"".join(encode_events([Token(Ticket(8), 4), token]))) == [Token(Ticket(8), 4), token]
    for error in ERRORS:
        [failed] = decode(b"".join(encode_events([Failed(Ticket(1), error)])))  # type: ignore[misc]
        assert isinstance(failed, Failed)
        assert (type(failed.error), failed.error.body(), str(failed.error)) == (type(error), error.body(), str(error))


def test_an_error_that_only_the_engine_knows_is_an_engine_error() -> None:
    told = {"ticket": 1, "error": ("NotHere", {"message": "lost", "param": None})}
    data = msgspec.msgpack.encode(([("Failed", told, None)], []))
    [failed] = decode(data)  # type: ignore[misc]
    assert isinstance(failed, Failed)
    assert type(failed.error) is EngineError
    assert failed.error.message == "lost"
