"""What other threads ask of the engine, and what its mover reports, in the order in which it came."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable, Iterator

from app.gpu.kv.moves import Moved
from app.messages import Command

Message = Command | Moved


class Inbox:
    """`put` and `close` may be called from any thread, the rest from the engine's."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        """None is the last."""
        self._taken: deque[Message] = deque()
        """Of the queue, and not handled yet."""
        self.closed = False
        """Whether everything has been taken that came before `close`."""

    def put(self, message: Message) -> None:
        """Queue a message."""
        self._queue.put(message)

    def close(self) -> None:
        """Let nothing that comes from now on be taken."""
        self._queue.put(None)

    @property
    def is_empty(self) -> bool:
        """Whether no message waits to be handled, as far as one can tell."""
        return not self._taken and self._queue.empty()

    def wait(self, timeout_s: float | None) -> None:
        """Until there is a message to handle, or the time is over; None: as long as it takes."""
        if not self._taken:
            with contextlib.suppress(queue.Empty):
                self._take(self._queue.get(timeout=timeout_s))

    def drain(self) -> None:
        """Take all that has come."""
        with contextlib.suppress(queue.Empty):
            while not self.closed:
                self._take(self._queue.get_nowait())

    def take_while(self, wanted: Callable[[Message], bool]) -> Iterator[Message]:
        """Hand out what has been taken, up to the first message that is not wanted yet."""
        while self._taken and wanted(self._taken[0]):
            yield self._taken.popleft()

    def _take(self, message: Message | None) -> None:
        if message is None:
            self.closed = True
        else:
            self._taken.append(message)
