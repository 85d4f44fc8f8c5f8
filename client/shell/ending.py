"""Signals that end a command."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDINGS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Windows has no hang-up."""


@contextmanager
def ended_in_order() -> Iterator[None]:
    """In the block SIGTERM and a terminal that closes raise `SystemExit`, so that what was opened is closed."""

    def hear(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, hear) for each in ENDINGS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
