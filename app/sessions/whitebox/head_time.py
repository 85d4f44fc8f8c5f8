"""When the head may be applied to what sessions keep: a lens is computed by the engine between two steps."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from app.bridge.executor import EngineExecutor
from app.domain.values import Ticket
from app.messages import Lens, MapLens

SHARE = 0.1
"""Of the engine's time, that all lenses together take while turns are under way: tokens wait for no more."""

LOOK_S = 0.05
"""How often a rest looks whether any turn is still under way."""


class _Timed(Protocol):
    @property
    def seconds(self) -> float: ...


Found = TypeVar("Found", bound=_Timed)


class HeadTime:
    """Has lenses computed, one at a time. Used on the event loop only.

    While turns are under way, there is a rest after each. A tenant waits for one at a time, so that tenants take turns.
    """

    def __init__(self, executor: EngineExecutor, any_runs: Callable[[], bool]) -> None:
        """`any_runs` says whether any turn is under way."""
        self._executor = executor
        self._any_runs = any_runs
        self._asking: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By tenant."""
        self._computing = asyncio.Lock()
        self._rests_until = 0.0

    async def take(self, owner: str | None, make: Callable[[Ticket], Lens | MapLens], answer: type[Found]) -> Found:
        """Wait until it is time for the tenant's, and have it computed; returns the `answer`. The caller may be
        cancelled at any moment.
        """
        async with self._asking[owner]:
            await self._computing.acquire()
            try:
                while (rest := self._rests_until - time.perf_counter()) > 0 and self._any_runs():  # noqa: ASYNC110 (most rests are a moment)
                    await asyncio.sleep(min(rest, LOOK_S))
            except BaseException:
                self._computing.release()
                raise
            # The engine computes it though its client leaves, so that the rest after it is due all the same.
            return cast("Found", await asyncio.shield(self._computed(make, answer)))

    async def _computed(self, make: Callable[[Ticket], Lens | MapLens], answer: type[Found]) -> Found:
        """Then others may wait for the next one."""
        try:
            found: Found = await self._executor.call(make)
            self._rests_until = time.perf_counter() + found.seconds * (1 / SHARE - 1)
            return found
        finally:
            self._computing.release()
