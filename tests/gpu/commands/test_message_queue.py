"""The engine's inbox: order, ends and waiting."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Timer

import pytest

from app.gpu.commands.message_queue import Inbox, Message
from app.gpu.kv.moves import Moved


def filled(*numbers: int) -> Inbox:
    """An inbox with these messages, none taken yet."""
    inbox = Inbox()
    for number in numbers:
        inbox.put(Moved(number))
    return inbox


def handed_out(inbox: Inbox) -> list[int]:
    """The numbers of all messages that have been taken."""
    return [number_of(message) for message in inbox.take_while(lambda _: True)]


def number_of(message: Message) -> int:
    assert isinstance(message, Moved)
    return message.number


def test_messages_keep_their_order_however_they_are_taken() -> None:
    inbox = filled(1, 2)
    inbox.wait(None)
    inbox.put(Moved(3))
    inbox.drain()
    assert handed_out(inbox) == [1, 2, 3]
    assert inbox.is_empty


def test_what_has_not_been_taken_is_not_handed_out() -> None:
    inbox = filled(1)
    assert not inbox.is_empty
    assert handed_out(inbox) == []
    inbox.drain()
    assert not inbox.is_empty
    assert handed_out(inbox) == [1]


def test_nothing_that_comes_after_the_close_is_taken() -> None:
    inbox = filled(1, 2)
    inbox.close()
    inbox.put(Moved(3))
    assert not inbox.closed, "what came before is still to be taken"
    for _ in range(2):
        inbox.drain()
        assert inbox.closed
    assert handed_out(inbox) == [1, 2]


def test_a_close_ends_a_wait() -> None:
    inbox = Inbox()
    inbox.close()
    inbox.wait(None)
    assert inbox.closed
    assert handed_out(inbox) == []


def test_a_wait_ends_at_once_while_something_is_taken() -> None:
    inbox = filled(1)
    inbox.drain()
    inbox.wait(None)  # forever, if it looked at the queue
    assert handed_out(inbox) == [1]


@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
def test_a_wait_for_nothing_takes_its_time(timeout_s: float) -> None:
    inbox, began = Inbox(), time.monotonic()
    inbox.wait(timeout_s)
    assert time.monotonic() - began >= 0.9 * timeout_s
    assert inbox.is_empty
    assert not inbox.closed


def test_a_wait_ends_with_a_message_of_another_thread() -> None:
    inbox = Inbox()
    Timer(0.02, inbox.put, [Moved(1)]).start()
    inbox.wait(None)
    assert handed_out(inbox) == [1]


def test_handing_out_stops_at_the_first_unwanted_and_keeps_it() -> None:
    inbox = filled(1, 2, 3, 4, 5)
    inbox.drain()
    before_three = [number_of(message) for message in inbox.take_while(lambda found: number_of(found) != 3)]
    assert before_three == [1, 2]
    assert handed_out(inbox) == [3, 4, 5], "those behind it waited with it"


def test_what_is_wanted_may_change_while_messages_are_handed_out() -> None:
    inbox, seen = filled(1, 2, 3), set[int]()
    inbox.drain()
    for message in inbox.take_while(lambda _: 2 not in seen):
        seen.add(number_of(message))
    assert seen == {1, 2}
    assert handed_out(inbox) == [3]


def test_no_message_of_many_threads_is_lost_and_each_thread_keeps_its_order() -> None:
    threads, each = 8, 500
    inbox, found = Inbox(), list[int]()

    def put_all(thread: int) -> None:
        for number in range(each):
            inbox.put(Moved(thread * each + number))

    with ThreadPoolExecutor(threads) as pool:
        for thread in range(threads):
            pool.submit(put_all, thread)
        while len(found) < threads * each:
            inbox.wait(10)
            assert not inbox.is_empty, "a message was lost"
            inbox.drain()
            found += handed_out(inbox)
    for thread in range(threads):
        mine = [number for number in found if number // each == thread]
        assert mine == list(range(thread * each, (thread + 1) * each))
