"""Maps are computed in slices that give way: to turns, to other tenants' maps, and to a client that leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from app.domain.activations import ActivationMap, ActivationNorms, LensRows, MapLayer
from app.domain.breakpoints import ALL
from app.domain.values import SessionId, Ticket
from app.messages import CloseMap, Command, MapLens, OpenMap, ReadNorms
from app.routers.dependencies import Services
from app.sessions.session import Session
from app.sessions.whitebox.activation_maps import MOST_SLICE, ActivationMaps
from app.sessions.whitebox.head_time import SHARE, HeadTime
from tests.pausing import PROMPT, start

CELLS = 400


class Engine:
    """Answers commands about maps, and notes them. A slice says that it took `seconds`."""

    failure: str | None = None

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds = seconds
        self.slices: list[tuple[float, MapLens]] = []
        self.begun = asyncio.Event()
        self.open: set[SessionId] = set()
        self.most_open = 0

    async def call(self, make: Callable[[Ticket], Command]) -> Any:
        command = make(Ticket(1))
        if isinstance(command, OpenMap):
            self.open.add(command.session)
            self.most_open = max(self.most_open, len(self.open))
            return ActivationMap(
                0, 40, 0, 40, tuple(range(40)), tuple(MapLayer(k, tuple(range(40))) for k in range(10))
            )
        if isinstance(command, ReadNorms):
            self.open.add(command.session)
            self.most_open = max(self.most_open, len(self.open))
            await asyncio.sleep(0)
            self.open.remove(command.session)
            return lambda: ActivationNorms(ActivationMap(0, 0, 0, 0, (), ()), (), None)
        assert isinstance(command, MapLens)
        self.slices.append((time.perf_counter(), command))
        self.begun.set()
        for _ in range(8):  # whoever waits for `begun` can leave meanwhile
            await asyncio.sleep(0)
        return LensRows(tuple(((command.first + k, -1.0),) for k in range(command.end - command.first)), self.seconds)

    def post(self, make: Callable[[Ticket], Command]) -> None:
        command = make(Ticket(1))
        assert isinstance(command, CloseMap)
        self.open.remove(command.session)


def maps_of(engine: Engine, *, busy: bool) -> ActivationMaps:
    return ActivationMaps(engine, HeadTime(engine, lambda: busy))  # type: ignore[arg-type]


def session(name: str, owner: str | None = None) -> Session:
    return Session(SessionId(name), owner)


@pytest.mark.parametrize("seconds", [0.0001, 0.01, 3.0])
async def test_a_map_is_whole_and_its_slices_are_small(seconds: float) -> None:
    engine = Engine(seconds)
    found = await maps_of(engine, busy=False).lens(session("a"), ALL, None, 1)
    assert [top[0][0] for top in found.tops] == list(range(CELLS))
    sizes = [each.end - each.first for _, each in engine.slices]
    assert max(sizes) <= MOST_SLICE
    assert (max(sizes) == MOST_SLICE) == (seconds == 0.0001)
    assert engine.open == set()


async def test_maps_of_several_tenants_share_that_time() -> None:
    engine = Engine(0.002)
    maps = maps_of(engine, busy=True)
    await asyncio.gather(*(maps.lens(session(name, name), ALL, None, 1) for name in "ab"))
    rests = [b - a for (a, _), (b, _) in zip(engine.slices, engine.slices[1:], strict=False)]
    assert min(rests) >= engine.seconds * (1 / SHARE - 1)
    first = [each.session for _, each in engine.slices[:8]]
    assert sorted(first) == list("aaaabbbb")


async def test_a_tenant_has_one_map_at_a_time() -> None:
    engine = Engine()
    maps = maps_of(engine, busy=False)
    await asyncio.gather(*(maps.lens(session(name, "acme"), ALL, None, 1) for name in "abc"))
    assert engine.most_open == 1
    assert [each.session for _, each in engine.slices] == sorted(each.session for _, each in engine.slices)
    await asyncio.gather(*(maps.norms(session(name, "acme"), ALL, None, None) for name in "abc"))
    assert engine.most_open == 1


async def test_who_leaves_has_no_more_slices_computed_and_costs_turns_no_more_than_who_stays() -> None:
    engine = Engine(0.002)
    maps = maps_of(engine, busy=True)
    for _ in range(4):
        reading = asyncio.create_task(maps.lens(session("a"), ALL, None, 1))
        await asyncio.wait_for(engine.begun.wait(), 10)
        engine.begun.clear()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    done = len(engine.slices)
    await maps.lens(session("b"), ALL, None, 1)
    assert [each.session for _, each in engine.slices[done:]] == ["b"] * (len(engine.slices) - done)
    assert engine.open == set()
    rests = [b - a for (a, _), (b, _) in zip(engine.slices, engine.slices[1:], strict=False)]
    assert min(rests) >= engine.seconds * (1 / SHARE - 1)


async def test_a_paused_turn_does_not_count_as_one_under_way(services: Services) -> None:
    """A session that is looked at while it is paused, alone on its server, is answered as fast as can be."""
    registry = services.sessions
    one = registry.create()
    assert not registry.table.turns.any_run()
    reader = start(registry, one, tokens=3)
    assert registry.table.turns.any_run()
    await reader.read()
    assert not registry.table.turns.any_run()
    assert (await registry.maps.lens(one, ALL, None, 1)).map.count == 0
    assert len(one.history) == len(PROMPT) + 3
