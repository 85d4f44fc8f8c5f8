"""Lenses, activation maps and memory maps leave turns most of the engine's time, and tenants take turns."""

import asyncio
import time
from collections.abc import Callable, Generator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from app.domain.activations import ActivationMap, ActivationNorms, LensAsk, LensRows
from app.domain.breakpoints import ALL
from app.domain.errors import EngineError
from app.domain.values import SessionId, Ticket
from app.gpu.commands.whitebox import MOST_SAVED_S, SHARE, Gaps
from app.messages import Attribute, CloseMap, Command, MapLens, OpenMap, ReadNorms
from app.sessions import registry
from app.sessions.keeper import SessionKeeper
from app.sessions.registry import MemoryReads
from app.sessions.session import Session
from app.sessions.whitebox import Whitebox

SECONDS = 0.002


class Engine:
    """Notes when it is asked for what, and says that each memory map took `SECONDS`. The second one fails."""

    failure: str | None = None

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.sessions: list[SessionId] = []
        """Whose head was run, in order."""
        self.open: set[SessionId] = set()
        self.most_open = 0
        self.hangs, self.looks = False, asyncio.Event()
        self.check = list  # it is up

    async def call(self, make: Callable[[Ticket], Command], *, stall_ends_it: bool = False) -> Any:
        command = make(Ticket(1))
        await asyncio.sleep(0)
        match command:
            case OpenMap() | ReadNorms():
                self.open.add(command.session)
                self.most_open = max(self.most_open, len(self.open))
                found = ActivationMap(0, 0, 0, 0, (), ())
                if isinstance(command, OpenMap):
                    return found
                await asyncio.sleep(0)
                self.open.remove(command.session)
                return lambda: ActivationNorms(found, (), None)
            case MapLens() | Attribute():
                self.sessions.append(command.session)
                self.open.add(command.session)
                self.looks.set()
                if self.hangs:
                    await asyncio.Event().wait()
                return LensRows(())
        self.asked.append(time.perf_counter())
        await asyncio.sleep(0.01)
        if len(self.asked) == 2:
            raise EngineError("this one fails")
        return SimpleNamespace(seconds=SECONDS)

    def post(self, make: Callable[[Ticket], Command]) -> None:
        command = make(Ticket(1))
        assert isinstance(command, CloseMap)
        self.open.remove(command.session)


class Clock:
    """A clock that only work moves on."""

    now = 0.0

    def parts(self, count: int, seconds: float) -> Generator[None, None, int]:
        for _ in range(count):
            self.now += seconds
            yield
        return count


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("app.gpu.commands.whitebox.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_looks_leave_steps_most_of_the_time_and_tenants_share_the_rest(clock: Clock) -> None:
    gaps, part_s = Gaps(), 0.0005
    looks = [(each, gaps.do(clock.parts(10_000, part_s), each, lambda: True)) for each in "aba"]
    spent, most = {"a": 0.0, "b": 0.0}, 0.0
    for step in range(500):
        gaps.open(is_busy=True)
        began = clock.now
        for tenant, look in looks:
            before = clock.now
            next(look)
            spent[tenant] += clock.now - before
        most = max(most, clock.now - began)
        clock.now += 60.0 if step == 400 else 0.024  # a long prompt was computed
    # The most was saved before the first step, and by the long prompt.
    assert 0.9 < sum(spent.values()) / (SHARE * (clock.now - 60.0) + 2 * MOST_SAVED_S) < 1.1
    assert min(spent.values()) > 0.4 * sum(spent.values())
    assert most <= MOST_SAVED_S + 2 * part_s


@pytest.mark.parametrize("is_one", [True, False])
def test_looks_owe_what_long_parts_take(clock: Clock, is_one: bool) -> None:
    """Many looks of one part, or one of many."""
    gaps, parts, part_s = Gaps(), 10, 0.5
    for _ in range(1 if is_one else parts):
        look = gaps.do(clock.parts(parts if is_one else 1, part_s), "", lambda: True)
        gaps.open(is_busy=True)
        while next(look, "done") != "done":
            clock.now += 0.02
            gaps.open(is_busy=True)
    assert 0.7 < parts * part_s / (SHARE * clock.now) < 1.3


async def test_all_who_ask_in_a_moment_get_one_map_and_the_engine_rests_after_each() -> None:
    engine = Engine()
    reads = MemoryReads(engine)  # type: ignore[arg-type]
    found = await asyncio.gather(*(reads.read() for _ in range(50)))
    assert len({id(each) for each in found}) == len(engine.asked) == 1
    with pytest.raises(EngineError):
        await reads.read()
    assert min(later - earlier for earlier, later in pairwise(engine.asked)) >= SECONDS * (1 / registry.SHARE - 1)


def maps_of(engine: Engine) -> Whitebox:
    return Whitebox(engine, SessionKeeper(None))  # type: ignore[arg-type]


def session(name: str, owner: str | None = None) -> Session:
    return Session(SessionId(name), owner)


async def test_a_tenant_has_one_map_at_a_time() -> None:
    engine = Engine()
    maps = maps_of(engine)
    await asyncio.gather(*(maps.lens_map(session(name, "acme"), ALL, None, LensAsk(1)) for name in "abc"))
    assert engine.most_open == 1
    assert engine.sessions == sorted(engine.sessions)
    await asyncio.gather(*(maps.norms(session(name, "acme"), ALL, None, None) for name in "abc"))
    assert engine.most_open == 1


@pytest.mark.parametrize("is_map", [True, False])
async def test_who_leaves_has_its_map_closed(is_map: bool) -> None:
    engine = Engine()
    engine.hangs = True
    maps = maps_of(engine)
    look = (
        maps.lens_map(session("a"), ALL, None, LensAsk(1)) if is_map else maps.attribution(session("a"), ALL, (1, 2), 3)
    )
    reading = asyncio.create_task(look)
    await asyncio.wait_for(engine.looks.wait(), 10)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert engine.open == set()
    engine.hangs = False
    await maps.lens_map(session("b"), ALL, None, LensAsk(1))
    assert engine.sessions == ["a", "b"]
