"""`python -m app.gpu.ranks ORDERS OUT IN SLAB`: a rank, at the other ends of three sockets of rank 0.

It ends with rank 0, or with its own first error.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from select import poll

logger = logging.getLogger(__name__)

ORPHANED, FAILED = 0, 1
"""Exit statuses."""


def main() -> None:
    """Serve until rank 0 closes the sockets. Signals that end things are for the server."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    *descriptors, slab = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(descriptors[0],), name="djinn-orphan", daemon=True).start()
    with ending_with_it():
        from app.gpu.ranks.follower import follow  # imports PyTorch

        orders, out, back = (Connection(descriptor) for descriptor in descriptors)
        follow(orders, (out, back), slab, ending_with_it)


@contextmanager
def ending_with_it() -> Iterator[None]:
    """End the process when what is within ends, whatever other threads do."""
    status = FAILED
    try:
        yield
    except (EOFError, ConnectionError):
        status = ORPHANED
    except BaseException:
        logger.exception("a rank has failed")
    finally:
        os._exit(status)


def _end_with(descriptor: int) -> None:
    """End the process with the other end of a socket: it may be within a sum that rank 0 takes no part in."""
    hangup = poll()
    hangup.register(descriptor, 0)
    hangup.poll()
    os._exit(ORPHANED)


if __name__ == "__main__":
    main()
