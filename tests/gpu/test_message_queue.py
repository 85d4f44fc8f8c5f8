"""The message queue of an engine: order, ends and waiting."""

from concurrent.futures import ThreadPoolExecutor

from app.gpu.engine import Message, MessageQueue
from app.gpu.state.moves import Moved


def filled(*numbers: int) -> MessageQueue:
    """A queue with these messages, none taken yet."""
    messages = MessageQueue()
    for number in numbers:
        messages.put(Moved(number))
    return messages


def handed_out(messages: MessageQueue) -> list[int]:
    """The numbers of all messages that have been taken."""
    return [number_of(message) for message in messages.take_while(lambda _: True)]


def number_of(message: Message) -> int:
    assert isinstance(message, Moved)
    return message.number


def test_messages_keep_their_order_however_they_are_taken() -> None:
    messages = filled(1, 2)
    messages.wait(None)
    messages.put(Moved(3))
    messages.drain()
    assert handed_out(messages) == [1, 2, 3]
    assert messages.is_empty


def test_what_has_not_been_taken_is_not_handed_out() -> None:
    messages = filled(1)
    assert not messages.is_empty
    assert handed_out(messages) == []
    messages.drain()
    assert not messages.is_empty
    messages.wait(None)  # forever, if it looked at the queue
    assert handed_out(messages) == [1]


def test_nothing_that_comes_after_the_close_is_taken() -> None:
    messages = filled(1, 2)
    messages.close()
    messages.put(Moved(3))
    assert not messages.closed, "what came before is still to be taken"
    for _ in range(2):
        messages.drain()
        assert messages.closed
    assert handed_out(messages) == [1, 2]


def test_handing_out_stops_at_the_first_unwanted_and_keeps_it() -> None:
    messages = filled(1, 2, 3, 4, 5)
    messages.drain()
    before_three = [number_of(message) for message in messages.take_while(lambda found: number_of(found) != 3)]
    assert before_three == [1, 2]
    assert handed_out(messages) == [3, 4, 5], "those behind it waited with it"


def test_no_message_of_many_threads_is_lost_and_each_thread_keeps_its_order() -> None:
    threads, each = 8, 500
    messages, found = MessageQueue(), list[int]()

    def put_all(thread: int) -> None:
        for number in range(each):
            messages.put(Moved(thread * each + number))

    with ThreadPoolExecutor(threads) as pool:
        for thread in range(threads):
            pool.submit(put_all, thread)
        while len(found) < threads * each:
            messages.wait(10)
            assert not messages.is_empty, "a message was lost"
            messages.drain()
            found += handed_out(messages)
    for thread in range(threads):
        mine = [number for number in found if number // each == thread]
        assert mine == list(range(thread * each, (thread + 1) * each))
