"""The queue of messages to the engine: commands of other threads and reports of its mover."""

import contextlib
import queue
from collections import deque
from collections.abc import Callable, Iterator

from app.gpu.state.moves import Moved
from app.messages import Command

Message = Command | Moved


class MessageQueue:
    """`put` and `close` may be called from any thread, the rest from the engine's."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        """None is the last."""
        self._taken: deque[Message] = deque()
        """Messages out of the queue that are not handled yet."""
        self.closed = False
        """Whether every message before `close` has been taken."""

    def put(self, message: Message) -> None:
        """Queue a message."""
        self._queue.put(message)

    def close(self) -> None:
        """Take no message that comes from now on."""
        self._queue.put(None)

    @property
    def is_empty(self) -> bool:
        """Whether no message waits to be handled; one may come at any moment."""
        return not self._taken and self._queue.empty()

    @property
    def has_taken(self) -> bool:
        """Whether messages have been taken that are not handled yet."""
        return bool(self._taken)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until there is a message to handle, or the time is over; None: without end."""
        if not self._taken:
            with contextlib.suppress(queue.Empty):
                self._take(self._queue.get(timeout=timeout_s))

    def drain(self) -> None:
        """Take all messages that have come."""
        with contextlib.suppress(queue.Empty):
            while not self.closed:
                self._take(self._queue.get_nowait())

    def take_while(self, wanted: Callable[[Message], bool]) -> Iterator[Message]:
        """Hand out the messages that have been taken, up to the first that is not wanted yet."""
        while self._taken and wanted(self._taken[0]):
            yield self._taken.popleft()

    def _take(self, message: Message | None) -> None:
        if message is None:
            self.closed = True
        else:
            self._taken.append(message)
