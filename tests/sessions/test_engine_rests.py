"""Lenses of checkpoints and memory maps leave turns most of the engine's time, and tenants take turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from app.domain.activations import CheckpointLens
from app.domain.breakpoints import Positions
from app.domain.errors import EngineError
from app.domain.values import SessionId, Ticket
from app.messages import Inspect, Lens
from app.sessions import memory_reads
from app.sessions.memory_reads import MemoryReads
from app.sessions.whitebox import head_time
from app.sessions.whitebox.head_time import HeadTime

SECONDS = 0.002


class Engine:
    """Notes when it is asked for what, and says that each answer took `SECONDS`. The second memory map fails."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.sessions: list[SessionId] = []
        self.is_asked = asyncio.Event()

    async def call(self, make: Callable[[Ticket], Lens | Inspect]) -> Any:
        command = make(Ticket(1))
        self.asked.append(time.perf_counter())
        self.is_asked.set()
        if isinstance(command, Lens):
            self.sessions.append(command.session)
            await asyncio.sleep(0)
            return CheckpointLens((), SECONDS)
        number = len(self.asked)
        await asyncio.sleep(0.01)
        if number == 2:
            raise EngineError("this one fails")
        return SimpleNamespace(seconds=SECONDS, number=number)

    def assert_rested(self, share: float) -> None:
        """Others had all but `share` of the time."""
        assert min(later - earlier for earlier, later in pairwise(self.asked)) >= SECONDS * (1 / share - 1)


async def look(head: HeadTime, owner: str) -> None:
    def make(ticket: Ticket) -> Lens:
        return Lens(ticket, SessionId(owner), Positions(last=True), 1)

    assert await head.take(owner, make, CheckpointLens) == CheckpointLens((), SECONDS)


async def test_many_lenses_leave_turns_most_of_the_time_and_another_tenant_waits_for_one() -> None:
    engine = Engine()
    head = HeadTime(engine, lambda: True)  # type: ignore[arg-type]
    await asyncio.gather(*(look(head, "greedy") for _ in range(8)), look(head, "quiet"))
    engine.assert_rested(head_time.SHARE)
    assert engine.sessions.index(SessionId("quiet")) == 1


async def test_where_no_turn_runs_no_lens_waits() -> None:
    head = HeadTime(Engine(), lambda: False)  # type: ignore[arg-type]
    began = time.perf_counter()
    await asyncio.gather(*(look(head, "alone") for _ in range(8)))
    assert time.perf_counter() - began < 8 * SECONDS * (1 / head_time.SHARE - 1)


async def test_all_who_ask_in_a_moment_get_one_map_and_the_engine_rests_after_each() -> None:
    engine = Engine()
    reads = MemoryReads(engine)  # type: ignore[arg-type]
    found = await asyncio.gather(*(reads.read() for _ in range(50)))
    assert len({id(each) for each in found}) == len(engine.asked) == 1
    with pytest.raises(EngineError):
        await reads.read()
    engine.assert_rested(memory_reads.SHARE)


async def test_who_asks_while_one_is_made_gets_a_newer_one() -> None:
    engine = Engine()
    reads = MemoryReads(engine)  # type: ignore[arg-type]
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
