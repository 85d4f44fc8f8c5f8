"""When the server starts no other engine, or waits no longer for one that loads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from app.domain.errors import EngineError
from app.domain.values import FinishReason, ModelInfo, Ticket, TurnUsage
from app.engine_process import engine as engine_module
from app.engine_process.channel import Channel, Closed
from app.engine_process.codec import encode, encode_events
from app.engine_process.deaths import MOST, WITHIN_S, Deaths
from app.engine_process.engine import EngineProcess
from app.engine_process.frames import Beat, Loaded
from app.engine_process.loading import load_frame
from app.messages import Back, Event, Lost, Replacement, TurnFinished
from tests.bridge.test_executor import info
from tests.serving import tiny_settings

__all__ = ["info"]

FINISHED = TurnFinished(Ticket(1), FinishReason.LENGTH, TurnUsage(prompt_tokens=1, completion_tokens=1), 2)
SECONDS = 10.0


@dataclass
class MadeUpChild:
    """A process that does what `live` does with its end of the channel, and then dies."""

    live: Callable[[Channel], None]
    pid: int = 1
    channel: Channel = field(init=False)

    def __post_init__(self) -> None:
        ours, self._socket = socket.socketpair()
        self.channel, self._other = Channel(ours), Channel(self._socket)
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self) -> str:
        return "its process was ended"

    def kill(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self.live(self._other)
        except (Closed, ValueError, OSError):  # it was killed
            return
        self._other.drain(SECONDS)
        self._other.close()


def served(lives: Iterator[Callable[[Channel], None]], timeout_s: float = SECONDS) -> EngineProcess:
    """An engine whose processes live one after the other as `lives` says, loaded."""
    engine = EngineProcess(timeout_s, lambda: MadeUpChild(next(lives)))  # type: ignore[arg-type, return-value]
    engine.begin(load_frame(tiny_settings(), 0))
    return engine.loaded()


def load(channel: Channel, info: ModelInfo) -> None:
    assert channel.receive(SECONDS)
    channel.send(encode(Loaded(info)))


def run(engine: EngineProcess) -> tuple[list[Event | Replacement], str]:
    """What the engine tells until it gives up, and why it does."""
    told: list[Event | Replacement] = []
    with pytest.raises(EngineError) as caught:
        engine.run(told.extend)
    return told, caught.value.message


def test_engines_that_die_before_a_turn_ends_are_not_started_for_ever(info: ModelInfo) -> None:
    def die(channel: Channel) -> None:
        load(channel, info)

    told, reason = run(served(die for _ in range(100)))
    assert reason == "it died 5 times within 10 minutes, and no turn came to its end"
    assert [type(each) for each in told] == [Lost, Back] * (MOST - 1) + [Lost]


def test_engines_that_work_may_die_more_often(info: ModelInfo) -> None:
    numbers = iter(range(100))

    def work_and_die(channel: Channel) -> None:
        load(channel, info)
        if next(numbers) < 2 * MOST:
            channel.send(encode_events([FINISHED]))

    told, _ = run(served(work_and_die for _ in range(100)))
    assert sum(isinstance(each, Lost) for each in told) == 2 * MOST + MOST - 1


def test_deaths_of_long_ago_do_not_count() -> None:
    now = 0.0
    deaths = Deaths(lambda: now)
    for _ in range(3 * MOST):
        now += WITHIN_S / (MOST - 1) + 1
        deaths.note()


def test_an_engine_that_never_ends_loading_is_given_up_for_another(
    info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(engine_module, "LOOK_S", 0.05)
    monkeypatch.setattr(engine_module, "LOADS", 0.0)

    def die(channel: Channel) -> None:
        load(channel, info)

    def hang(channel: Channel) -> None:
        while True:
            channel.receive(SECONDS)

    is_back = threading.Event()

    def stay(channel: Channel) -> None:
        load(channel, info)
        is_back.wait(SECONDS)

    engine = served(iter([die, hang, stay]), 0.2)
    told: list[Event | Replacement] = []

    def note(events: Sequence[Event | Replacement]) -> None:
        told.extend(events)
        if any(isinstance(each, Back) for each in events):
            engine.stop()
            is_back.set()

    engine.run(note)
    assert [type(each) for each in told] == [Lost, Back]


def test_an_engine_that_talks_on_and_never_stops_is_ended(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to a disk that has stalled holds up its end, and nothing else of it."""
    monkeypatch.setattr(engine_module, "STOP_TIMEOUT_S", 0.05)

    def talk_on(channel: Channel) -> None:
        load(channel, info)
        while True:
            channel.receive(0.01)
            channel.send(encode(Beat(0.0)))

    engine = served(iter([talk_on]))
    thread = threading.Thread(target=engine.run, args=(lambda events: None,))
    thread.start()
    engine.stop()
    thread.join(SECONDS)
    assert not thread.is_alive()
