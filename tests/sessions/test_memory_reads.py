"""Memory maps: many who ask cost the engine little, and nobody gets one from before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from app.domain.errors import EngineError
from app.domain.values import Ticket
from app.messages import Inspect
from app.sessions.memory_reads import SHARE, MemoryReads

SECONDS = 0.002


class Engine:
    """Notes when it is asked, and says that each map took `SECONDS`."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.is_asked = asyncio.Event()

    async def call(self, make: Callable[[Ticket], Inspect]) -> Any:
        assert isinstance(make(Ticket(1)), Inspect)
        self.asked.append(time.perf_counter())
        self.is_asked.set()
        number = len(self.asked)
        await asyncio.sleep(0.01)
        if number == 2:
            raise EngineError("this one fails")
        return SimpleNamespace(seconds=SECONDS, number=number)


def reads_of(engine: Engine) -> MemoryReads:
    return MemoryReads(engine)  # type: ignore[arg-type]


async def test_all_who_ask_in_a_moment_get_one_map() -> None:
    engine = Engine()
    reads = reads_of(engine)
    found = await asyncio.gather(*(reads.read() for _ in range(50)))
    assert len({id(each) for each in found}) == len(engine.asked) == 1


async def test_who_asks_while_one_is_made_gets_a_newer_one() -> None:
    engine = Engine()
    reads = reads_of(engine)
    first = asyncio.create_task(reads.read())
    await engine.is_asked.wait()
    later = [asyncio.create_task(reads.read()) for _ in range(9)]
    await asyncio.sleep(0)
    later[0].cancel()
    await first
    failed = await asyncio.gather(*later[1:], return_exceptions=True)
    assert {type(each) for each in failed} == {EngineError}
    await reads.read()
    assert len(engine.asked) == 3


async def test_the_engine_rests_after_each_map() -> None:
    engine = Engine()
    reads = reads_of(engine)
    await reads.read()
    with pytest.raises(EngineError):
        await reads.read()
    rests = [later - earlier for earlier, later in pairwise(engine.asked)]
    assert min(rests) >= SECONDS * (1 / SHARE - 1)
