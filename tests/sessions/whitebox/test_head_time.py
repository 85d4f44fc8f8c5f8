"""Lenses of checkpoints leave turns most of the engine's time, and those of several tenants take turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise

from app.domain.activations import CheckpointLens
from app.domain.breakpoints import Positions
from app.domain.values import SessionId, Ticket
from app.messages import Lens, MapLens
from app.sessions.whitebox.head_time import SHARE, HeadTime

SECONDS = 0.002


class Engine:
    """Notes the lenses that it is asked for, and says that each took `SECONDS`."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, SessionId]] = []

    async def call(self, make: Callable[[Ticket], Lens | MapLens]) -> CheckpointLens:
        self.asked.append((time.perf_counter(), make(Ticket(1)).session))
        await asyncio.sleep(0)
        return CheckpointLens((), SECONDS)


async def look(head: HeadTime, owner: str) -> None:
    def make(ticket: Ticket) -> Lens:
        return Lens(ticket, SessionId(owner), Positions(last=True), 1)

    assert await head.take(owner, make, CheckpointLens) == CheckpointLens((), SECONDS)


def head_of(engine: Engine, *, busy: bool) -> HeadTime:
    return HeadTime(engine, lambda: busy)  # type: ignore[arg-type]


async def test_many_lenses_leave_turns_most_of_the_time() -> None:
    engine = Engine()
    head = head_of(engine, busy=True)
    await asyncio.gather(*(look(head, "greedy") for _ in range(8)))
    rests = [later - earlier for (earlier, _), (later, _) in pairwise(engine.asked)]
    assert min(rests) >= SECONDS * (1 / SHARE - 1)


async def test_a_tenant_waits_for_one_lens_of_another_and_no_more() -> None:
    engine = Engine()
    head = head_of(engine, busy=True)
    await asyncio.gather(*(look(head, "greedy") for _ in range(8)), look(head, "quiet"))
    assert [session for _, session in engine.asked].index(SessionId("quiet")) == 1


async def test_where_no_turn_runs_nothing_waits() -> None:
    engine = Engine()
    head = head_of(engine, busy=False)
    began = time.perf_counter()
    await asyncio.gather(*(look(head, "alone") for _ in range(8)))
    assert time.perf_counter() - began < 8 * SECONDS * (1 / SHARE - 1)
