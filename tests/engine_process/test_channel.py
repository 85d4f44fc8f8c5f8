"""Frames between two ends: whole, in order, and nobody waits for a reader."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine_process.channel import PART_BYTES, Channel, Closed

SECONDS = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    pair = socket.socketpair()
    one, other = (Channel(end) for end in pair)
    yield one, other
    one.close()
    other.close()


def test_both_ends_can_send_more_than_the_socket_holds_before_either_reads(ends: tuple[Channel, Channel]) -> None:
    frame = bytes(20 << 20)
    for end in ends:
        end.send(frame)
    assert [end.receive(SECONDS) for end in ends] == [frame, frame]


def test_a_small_frame_passes_large_ones_that_may_be_late(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    large = [bytes([number]) * (10 << 20) for number in range(2)]
    for frame in large:
        one.send(frame, may_be_late=True)
    one.send(b"token")
    one.send(b"late", may_be_late=True)  # not large: it keeps its place
    assert [other.receive(SECONDS) for _ in range(4)] == [b"token", b"late", *large]


@given(frames=st.lists(st.tuples(st.integers(0, 3 * PART_BYTES), st.booleans()), max_size=12))
def test_each_kind_of_frame_keeps_its_order(frames: list[tuple[int, bool]]) -> None:
    pair = socket.socketpair()
    one, other = (Channel(end) for end in pair)
    sent = [(number.to_bytes(2, "big") + bytes(size), late) for number, (size, late) in enumerate(frames)]
    for frame, late in sent:
        one.send(frame, may_be_late=late)
    found = [other.receive(SECONDS) for _ in sent]
    one.close()
    other.close()
    large = [frame for frame, late in sent if late and len(frame) > PART_BYTES]
    assert [frame for frame in found if frame in large] == large
    assert [frame for frame in found if frame not in large] == [frame for frame, _ in sent if frame not in large]


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


def test_a_channel_that_closes_with_frames_to_write_leaves_no_thread() -> None:
    def writers() -> int:
        return sum(thread.name == "djinn-frames" for thread in threading.enumerate())

    before = writers()
    one, other = (Channel(end) for end in socket.socketpair())
    one.send(bytes(20 << 20))
    time.sleep(0.1)  # its thread waits for room by now
    one.close()
    other.close()
    deadline = time.monotonic() + SECONDS
    while writers() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
