"""Waiting for something that a server does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TIMEOUT_S = 60.0
POLL_S = 0.01


async def until(happened: Callable[[], bool]) -> None:
    """Return when it has; fails if it takes too long."""
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        assert time.monotonic() < deadline
        await asyncio.sleep(POLL_S)
