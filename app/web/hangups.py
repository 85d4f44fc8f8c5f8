"""SIGHUP: what a terminal says when it closes, and an operator to have files read again."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self


class Hangups:
    """Keeps SIGHUP until the server can take it: a server that loads its model has nothing yet that could hear it."""

    def __init__(self) -> None:
        self.were_ignored = False
        """Whether the process was started to hear none: `nohup` asks for that."""
        self._take: Callable[[], None] | None = None
        self._is_kept = False

    @classmethod
    @contextmanager
    def heard(cls) -> Iterator[Self]:
        """In the block SIGHUP ends the process no more. Call on the main thread."""
        hangups = cls()
        before = signal.signal(signal.SIGHUP, hangups._hear)
        hangups.were_ignored = before is signal.SIG_IGN
        try:
            yield hangups
        finally:
            signal.signal(signal.SIGHUP, before)

    def hand_to(self, take: Callable[[], None]) -> None:
        """Have `take` called for each from now on, and for all that have come before once. It runs between any two
        steps of the main thread.
        """
        self._take = take
        if self._is_kept:
            self._is_kept = False
            take()

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        if self._take is None:
            self._is_kept = True
        else:
            self._take()
