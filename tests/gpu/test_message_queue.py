"""The message queue of an engine: its end, and many threads."""

from concurrent.futures import ThreadPoolExecutor

from app.gpu.engine import MessageQueue
from app.gpu.state.moves import Moved


def filled(*numbers: int) -> MessageQueue:
    """A queue with these messages, none taken yet."""
    messages = MessageQueue()
    for number in numbers:
        messages.put(Moved(number))
    return messages


def handed_out(messages: MessageQueue) -> list[int]:
    """The numbers of all messages that have been taken."""
    return [message.number for message in messages.take_while(lambda _: True)]  # type: ignore[union-attr]


def test_nothing_that_comes_after_the_close_is_taken() -> None:
    messages = filled(1, 2)
    messages.close()
    messages.put(Moved(3))
    assert not messages.closed, "what came before is still to be taken"
    for _ in range(2):
        messages.drain()
        assert messages.closed
    assert handed_out(messages) == [1, 2]


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
