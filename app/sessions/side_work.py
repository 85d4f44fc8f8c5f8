"""Work for clients beside their turns: texts made tokens, bodies parsed, grammars compiled, files written and read.

It takes processors and the event loop from all turns, so each tenant has its share of it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SHARE = 0.25
"""Of a tenant's time, that such work may take while turns of others are under way."""
FILE_BYTES_PER_S = 250e6
"""Of a session's file: it is hashed, written, read and sent. Rather too low, so that files do not hold up turns."""


class Lane(Enum):
    """Kinds of work that do not wait for each other: a file can take minutes, and a text takes milliseconds."""

    TEXT = auto()
    GRAMMAR = auto()
    FILE = auto()
    ACTIVATIONS = auto()
    """Answers with activations, which are in memory until their client has read them."""


@dataclass(slots=True)
class Piece:
    """One piece of work, which tells what it has cost."""

    seconds: float = 0.0
    """Of a processor."""

    @property
    def rest_s(self) -> float:
        """How long its tenant waits before the next one, if others are there."""
        return self.seconds * (1 / SHARE - 1)


class SideWork:
    """Has one piece of a tenant's work in a lane done at a time for two processors, in the order in which they were
    asked for.

    While turns of others are under way, it also waits after each piece. Used on the event loop only.
    """

    def __init__(self, others_run: Callable[[str | None], bool]) -> None:
        """`others_run` says whether tenants other than that one have turns under way."""
        self._others_run = others_run
        at_once = max(1, (os.cpu_count() or 1) // 2)
        self._free = defaultdict[tuple[str | None, Lane], asyncio.Semaphore](lambda: asyncio.Semaphore(at_once))
        self._rests_until = defaultdict[tuple[str | None, Lane], float](float)

    async def run(self, owner: str | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` makes of a text, on another thread. Who is cancelled leaves when it has returned."""
        async with self.turn(owner, Lane.TEXT) as piece:

            def timed() -> T:
                began = time.thread_time()
                try:
                    return function(*args, **kwargs)
                finally:
                    piece.seconds += time.thread_time() - began

            working = asyncio.ensure_future(asyncio.to_thread(timed))
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                await asyncio.wait([working])  # a thread cannot be cancelled: the next piece would run beside it
                raise

    @asynccontextmanager
    async def turn(self, owner: str | None, lane: Lane) -> AsyncIterator[Piece]:
        """A piece of work of the tenant, which lasts as long as the block."""
        key = owner, lane
        async with self._free[key]:
            rest = self._rests_until[key] - time.perf_counter()
            if rest > 0 and self._others_run(owner):
                await asyncio.sleep(rest)
            piece = Piece()
            try:
                yield piece
            finally:
                # A short piece beside a long one does not end the rest after that.
                self._rests_until[key] = max(self._rests_until[key], time.perf_counter() + piece.rest_s)
