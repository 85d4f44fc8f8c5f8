"""Ctrl-C while a turn runs."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import FrameType

from client._sync.session import Session
from client.errors import Conflict, DjinnError

RETRY_S = 0.05


@contextmanager
def ctrl_c_cancels(session: Session) -> Iterator[None]:
    """In the block the first Ctrl-C has the server cancel the turn, whose stream then ends in order. The second raises
    `KeyboardInterrupt`, for a server that does not answer.
    """
    over = Event()
    asking: list[Thread] = []

    def hear(_number: int, _frame: FrameType | None) -> None:
        if asking:
            raise KeyboardInterrupt
        asking.append(Thread(target=_cancel, args=(session, over), name="cancel", daemon=True))
        asking[0].start()

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()


def _cancel(session: Session, over: Event) -> None:
    """Until the turn is `over`: its request may still be on its way to the server."""
    while not over.is_set():
        try:
            session.cancel()
            return
        except Conflict:
            over.wait(RETRY_S)
        except DjinnError:  # the stream tells what is wrong
            return
