"""How a run hears that it is to end early."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """In the block SIGTERM does what Ctrl-C does, so that no server outlives the run that started it.

    Where Ctrl-C is ignored, as by what a shell runs in the background, SIGTERM raises KeyboardInterrupt all the same.
    """

    def hear(_number: int, _frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
