"""How the process of a rank ends: with rank 0, or with its own first error."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from select import poll

logger = logging.getLogger(__name__)

ORPHANED, FAILED = 0, 1
"""Exit statuses."""


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


def end_with(descriptor: int) -> None:
    """Wait until the other end of a socket is closed, and end the process: it may be within a sum that rank 0 will
    never take part in.
    """
    hangup = poll()
    hangup.register(descriptor, 0)
    hangup.poll()
    os._exit(ORPHANED)
