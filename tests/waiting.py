"""Wait for what must come, and fail if it does not."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0


def wait_until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Raises AssertionError if the condition does not hold within `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.02)


async def settled() -> None:
    """Let all tasks go on that wait for nothing but their turn of the event loop."""
    for _ in range(100):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """The same for asyncio, where the condition holds within `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it has not come"
        await asyncio.sleep(0.005)
