"""Lenses, activation maps and memory maps leave turns most of the engine's time, and tenants take turns."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from app.domain.activations import ActivationMap, ActivationNorms, LensAsk, LensRows, MapLayer
from app.domain.breakpoints import ALL, Positions
from app.domain.errors import EngineError
from app.domain.values import SessionId, Ticket
from app.messages import CloseMap, Command, Inspect, Lens, MapLens, OpenMap, ReadNorms
from app.sessions import registry, whitebox
from app.sessions.keeper import SessionKeeper
from app.sessions.registry import MemoryReads, SessionRegistry
from app.sessions.session import Session
from app.sessions.whitebox import MOST_SLICE, SLICE_S, HeadTime, Whitebox
from tests.pausing import PROMPT, start

SECONDS, CELLS, STEPS_PER_S = 0.002, 400, 400


class Engine:
    """Notes when it is asked for what, and says that each answer took `seconds`. The second memory map fails."""

    failure: str | None = None
    steps = property(lambda self: int(STEPS_PER_S * time.perf_counter()))

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.asked: list[float] = []
        self.slices: list[MapLens] = []
        self.sessions: list[SessionId] = []
        """Whose head was run, in order."""
        self.is_asked = asyncio.Event()
        self.open: set[SessionId] = set()
        self.most_open = 0

    async def call(self, make: Callable[[Ticket], Command], *, stall_ends_it: bool = False) -> Any:
        command = make(Ticket(1))
        if isinstance(command, OpenMap | ReadNorms):
            self.open.add(command.session)
            self.most_open = max(self.most_open, len(self.open))
        match command:
            case OpenMap():
                layers = tuple(MapLayer(k, tuple(range(40))) for k in range(10))
                return ActivationMap(0, 40, 0, 40, tuple(range(40)), layers)
            case ReadNorms():
                await asyncio.sleep(0)
                self.open.remove(command.session)
                return lambda: ActivationNorms(ActivationMap(0, 0, 0, 0, (), ()), (), None)
        self.asked.append(time.perf_counter())
        self.is_asked.set()
        if isinstance(command, Inspect):
            number = len(self.asked)
            await asyncio.sleep(0.01)
            if number == 2:
                raise EngineError("this one fails")
            return SimpleNamespace(seconds=self.seconds, number=number)
        assert isinstance(command, Lens | MapLens)
        self.sessions.append(command.session)
        for _ in range(8):  # a reader that waits for `is_asked` can leave meanwhile
            await asyncio.sleep(0)
        if isinstance(command, Lens):
            return LensRows((), self.seconds)
        self.slices.append(command)
        return LensRows(tuple(((command.first + k, -1.0),) for k in range(command.end - command.first)), self.seconds)

    def post(self, make: Callable[[Ticket], Command]) -> None:
        command = make(Ticket(1))
        assert isinstance(command, CloseMap)
        self.open.remove(command.session)

    def assert_rested(self, share: float) -> None:
        """Others had all but `share` of the time."""
        assert min(later - earlier for earlier, later in pairwise(self.asked)) >= self.seconds * (1 / share - 1)


async def look(head: HeadTime, owner: str) -> None:
    make = partial(Lens, session=SessionId(owner), positions=Positions(last=True), top_k=1)
    assert await head.take(owner, make) == LensRows((), SECONDS)


async def test_many_lenses_leave_turns_most_of_the_time_and_another_tenant_waits_for_one() -> None:
    engine = Engine()
    head = HeadTime(engine, lambda: True)  # type: ignore[arg-type]
    await asyncio.gather(*(look(head, "greedy") for _ in range(8)), look(head, "quiet"))
    engine.assert_rested(whitebox.SHARE)
    assert min(b - a for a, b in pairwise(engine.asked)) >= (whitebox.REST_STEPS - 1) / STEPS_PER_S
    assert engine.sessions.index(SessionId("quiet")) == 1


async def test_all_who_ask_in_a_moment_get_one_map_and_the_engine_rests_after_each() -> None:
    engine = Engine()
    reads = MemoryReads(engine)  # type: ignore[arg-type]
    found = await asyncio.gather(*(reads.read() for _ in range(50)))
    assert len({id(each) for each in found}) == len(engine.asked) == 1
    with pytest.raises(EngineError):
        await reads.read()
    engine.assert_rested(registry.SHARE)


def maps_of(engine: Engine, *, busy: bool) -> Whitebox:
    return Whitebox(engine, SessionKeeper(None), lambda: busy)  # type: ignore[arg-type]


def session(name: str, owner: str | None = None) -> Session:
    return Session(SessionId(name), owner)


@pytest.mark.parametrize("seconds", [0.0001, SLICE_S, 3.0])
async def test_a_map_is_whole_and_its_slices_are_small(seconds: float) -> None:
    engine = Engine(seconds)
    _, told = await maps_of(engine, busy=False).lens_map(session("a"), ALL, None, LensAsk(1))
    assert [top[0][0] for top in told.rows] == list(range(CELLS))
    sizes = [each.end - each.first for each in engine.slices]
    assert max(sizes) <= MOST_SLICE
    assert (max(sizes) == MOST_SLICE) == (seconds == 0.0001)
    assert engine.open == set()


async def test_a_tenant_has_one_map_at_a_time() -> None:
    engine = Engine()
    maps = maps_of(engine, busy=False)
    await asyncio.gather(*(maps.lens_map(session(name, "acme"), ALL, None, LensAsk(1)) for name in "abc"))
    assert engine.most_open == 1
    assert engine.sessions == sorted(engine.sessions)
    await asyncio.gather(*(maps.norms(session(name, "acme"), ALL, None, None) for name in "abc"))
    assert engine.most_open == 1


async def test_who_leaves_has_no_more_slices_computed_and_costs_turns_no_more_than_who_stays() -> None:
    engine = Engine()
    maps = maps_of(engine, busy=True)
    for _ in range(4):
        reading = asyncio.create_task(maps.lens_map(session("a"), ALL, None, LensAsk(1)))
        await asyncio.wait_for(engine.is_asked.wait(), 10)
        engine.is_asked.clear()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    done = len(engine.sessions)
    await maps.lens_map(session("b"), ALL, None, LensAsk(1))
    assert set(engine.sessions[done:]) == {"b"}
    assert engine.open == set()
    engine.assert_rested(whitebox.SHARE)


async def test_a_paused_turn_does_not_count_as_one_under_way(registry: SessionRegistry) -> None:
    """A session that is looked at while it is paused, alone on its server, is answered as fast as can be."""
    one = registry.create()
    assert not registry.table.turns.any_run()
    reader = start(registry, one, tokens=3)
    assert registry.table.turns.any_run()
    await reader.read()
    assert not registry.table.turns.any_run()
    assert (await registry.whitebox.lens_map(one, ALL, None, LensAsk(1)))[0].count == 0
    assert len(one.history) == len(PROMPT) + 3
