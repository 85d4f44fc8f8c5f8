"""What goes on behind everybody else's turns: how much of it is under way at a time."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

AT_ONCE = 8
"""Requests of all batches that are under way while there is no other turn; beside others, one is."""
LOOK_S = 0.05
"""How often a request that waits for its place looks whether the others are gone."""


class Places:
    """Which requests of batches and experiments are under way: few, and one while clients wait for their own turns."""

    def __init__(self, others_run: Callable[[], bool]) -> None:
        """`others_run` says whether clients wait for turns of their own."""
        self.others_run = others_run
        self._taken = 0
        self._asking = asyncio.Lock()
        """Those that ask take turns."""
        self._left = asyncio.Event()

    @asynccontextmanager
    async def place(self, at_once: int = AT_ONCE) -> AsyncIterator[None]:
        """Wait for a place, one of `at_once` while there is no other turn, and have it for the block."""
        async with self._asking:
            while self._taken >= (1 if self.others_run() else at_once):
                self._left.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._left.wait()
            self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
            self._left.set()

    async def rest(self, seconds: float) -> None:
        """Wait for so long, or until no client waits for a turn of its own."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.others_run():  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(min(left, LOOK_S))
