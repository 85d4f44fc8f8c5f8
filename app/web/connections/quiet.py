"""Warnings that clients cause: they must not fill a disk."""

import logging
import time

INTERVAL_S = 60.0


REFUSED_HANDSHAKE = "ASGI callable returned without completing handshake."
"""What uvicorn calls an error whenever a WebSocket is refused, also with a whole answer."""


class OncePerMinute(logging.Filter):
    """Lets each warning through once a minute, whatever its arguments are. Errors always pass, but for what is none."""

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[tuple[str, int], float] = {}
        """When the line of code that logs may do so again."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if record.levelno != logging.WARNING:
            return record.msg != REFUSED_HANDSHAKE
        place, now = (record.pathname, record.lineno), time.monotonic()
        if now < self._next.get(place, 0.0):
            return False
        self._next[place] = now + INTERVAL_S
        return True


ONCE_PER_MINUTE = OncePerMinute()
