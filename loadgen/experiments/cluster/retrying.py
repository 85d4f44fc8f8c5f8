"""Which errors a client of a cluster meets again and again without being at fault, and how it asks again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from client.errors import APIError, ConnectionFailed, ConnectionLost, DjinnError, RateLimited, Timeout

T = TypeVar("T")

NOTHING_DONE = frozenset(
    {"moving", "moving_on", "replica_away", "directory_away", "draining", "engine_restarting", "engine_stalled"}
)
"""Codes of requests that were not done."""
NOBODY_KNOWS = "replica_lost"
"""The code of those that were perhaps done."""
PAUSE_S = 0.2
JITTER = 0.5
"""Of a pause, at most as much more: clients that were refused together do not come back together."""


def is_harmless(error: DjinnError) -> bool:
    """Whether the request was surely not done, and can be repeated as it is."""
    if isinstance(error, ConnectionFailed | RateLimited):
        return True
    return isinstance(error, APIError) and error.code in NOTHING_DONE


def is_retryable(error: DjinnError) -> bool:
    """Whether a client may go on, if it first finds out what was done."""
    if is_harmless(error) or isinstance(error, ConnectionLost):
        return True
    return isinstance(error, APIError) and error.code == NOBODY_KNOWS


def code_of(error: DjinnError) -> str:
    """How an error is counted."""
    return (isinstance(error, APIError) and error.code) or type(error).__name__


async def pause(error: DjinnError) -> None:
    """Wait as long as the server asks to, or a little."""
    seconds = (isinstance(error, APIError) and error.retry_after) or PAUSE_S
    await asyncio.sleep(seconds * (1 + JITTER * random.random()))


async def retried(errors: Counter[str], ask: Callable[[], Awaitable[T]]) -> T:
    """What is answered in the end to a request that may be done twice. `errors` counts those on the way.

    Raises `DjinnError` for any other error. It does not end by itself: the caller sets a limit.
    """
    while True:
        try:
            return await ask()
        except DjinnError as error:
            if not is_retryable(error) and not isinstance(error, Timeout):
                raise
            errors[code_of(error)] += 1
            await pause(error)
