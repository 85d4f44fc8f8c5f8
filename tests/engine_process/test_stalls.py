"""When the server takes an engine for one that makes no progress, and when it trusts it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from app.domain.values import ModelInfo
from app.engine_process import engine as engine_module
from app.engine_process.channel import Channel
from app.engine_process.codec import encode
from app.engine_process.engine import SILENT_S, UNHEARD_S, EngineProcess, Stalls
from app.engine_process.frames import Beat
from app.engine_process.loading import load_frame
from app.messages import Event, GoesOn, Replacement, Stalled
from tests.engine_process.test_host import SECONDS, MadeUpChild, load
from tests.serving import tiny_settings

STUCK_S = 60.0
LOOK_S = 0.5


def told(stalls: Stalls, seconds: float) -> list[Stalled | GoesOn]:
    """What is told while the process is silent for that long."""
    found = []
    for _ in range(round(seconds / LOOK_S)):
        stalls.wait(LOOK_S)
        found.append(stalls.news())
    return [each for each in found if each is not None]


def test_a_silent_process_is_doubted_first_and_given_up_then() -> None:
    stalls = Stalls(STUCK_S)
    assert told(stalls, SILENT_S - LOOK_S) == []
    [doubt] = told(stalls, LOOK_S)
    assert doubt == Stalled("its process has said nothing for 3 s", ends_turns=False)
    [given_up] = told(stalls, UNHEARD_S)
    assert given_up == Stalled("its process has said nothing for 7 s", ends_turns=True)
    stalls.hear()
    assert stalls.news() == GoesOn()
    assert stalls.news() is None
    assert told(stalls, SILENT_S) == [doubt]


def test_an_engine_that_is_busy_with_one_thing_has_time_and_its_beats_do_not_clear_it() -> None:
    stalls = Stalls(STUCK_S)
    for seconds in range(int(STUCK_S)):
        stalls.hear(float(seconds))
        assert stalls.news() is None
    stalls.hear(STUCK_S)
    assert stalls.news() == Stalled("it has been busy with one thing for 60 s", ends_turns=True)
    stalls.hear()  # another thread of it says something
    assert stalls.news() is None
    stalls.hear(0.0)
    assert stalls.news() == GoesOn()


def run(live: Callable[[Channel], None], until: int, *, stuck_s: float = STUCK_S) -> list[Event | Replacement]:
    """What the server is told of one process, which is stopped after so many pieces of news."""
    engine = EngineProcess(SECONDS, lambda: MadeUpChild(live), stuck_s=stuck_s)  # type: ignore[arg-type, return-value]
    engine.begin(load_frame(tiny_settings(), 0))
    found: list[Event | Replacement] = []

    def deliver(news: Sequence[Event | Replacement]) -> None:
        found.extend(news)
        if len(found) == until:
            engine.stop()

    engine.loaded().run(deliver)
    return found


@pytest.fixture
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LOOK_S", 0.05)


@pytest.mark.usefixtures("in_no_time")
def test_an_engine_that_is_silent_and_speaks_again_stays(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.engine_process.engine.SILENT_S", 0.1)
    monkeypatch.setattr("app.engine_process.engine.UNHEARD_S", 0.2)

    def be_silent_once(channel: Channel) -> None:
        load(channel, info)
        channel.receive(0.5)
        while channel.receive(0.01) is None:
            channel.send(encode(Beat(0.0)))

    first, second, third = run(be_silent_once, 3)
    assert isinstance(first, Stalled)
    assert isinstance(second, Stalled)
    assert (first.ends_turns, second.ends_turns, third) == (False, True, GoesOn())


@pytest.mark.usefixtures("in_no_time")
def test_an_engine_that_beats_and_computes_one_thing_for_ever_has_stalled(info: ModelInfo) -> None:
    def be_stuck(channel: Channel) -> None:
        load(channel, info)
        channel.send(encode(Beat(1.0)))
        channel.send(encode(Beat(3.0)))
        channel.send(encode(Beat(0.0)))
        channel.receive(SECONDS)

    stuck, goes_on = run(be_stuck, 2, stuck_s=2.0)
    assert stuck == Stalled("it has been busy with one thing for 3 s", ends_turns=True)
    assert goes_on == GoesOn()
