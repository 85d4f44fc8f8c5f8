"""What an engine's process says of itself while it works, when the server trusts it, and when it starts no other."""

import math
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from app.domain.errors import EngineError
from app.domain.values import FinishReason, ModelInfo, SamplingParams, SessionId, StopRule, Ticket, TurnUsage
from app.engine_process import engine as engine_module
from app.engine_process import host
from app.engine_process.channel import Channel, Closed
from app.engine_process.engine import MOST, EngineProcess
from app.engine_process.frames import Beat, Load, Loaded, decode, encode, encode_events
from app.engine_process.host import _Host
from app.gpu.kernels.attention.base import Batch
from app.gpu.models.base import LayerStack
from app.messages import Back, Event, GoesOn, Lost, Open, Replacement, Stalled, Submit, TurnFinished
from tests.engine_process.test_channel import ends
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.conftest import tiny_llama
from tests.gpu.wrapping import WrappedStack
from tests.serving import tiny_settings

__all__ = ["ends", "tiny_llama"]

SECONDS = 60.0
BEATS = 4
TOKENS = 80
"""More than a recorded program of all layers takes."""


class SlowStack(WrappedStack):
    """Each layer lasts until it is let go."""

    def __init__(self, stack: LayerStack) -> None:
        super().__init__(stack)
        self.go = threading.Semaphore(0)
        self.is_slow = False
        """Not while an engine is put together."""
        self.layers = 0

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        if self.is_slow:
            assert self.go.acquire(timeout=SECONDS)
            self.layers += 1
        return super().layer(index, hidden, batch, kv)


def test_a_step_whose_layers_get_on_is_not_taken_for_one_that_hangs(
    tiny_llama: TinyModel, ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "BEAT_S", 0.02)
    ours, theirs = ends
    stack = SlowStack(tiny_llama.stack)
    engine = replace(tiny_llama, stack=stack).engine(max_step_tokens=TOKENS)
    stack.is_slow = True
    with socket.socket() as nobody:
        served = _Host(theirs, nobody, engine)
    threading.Thread(target=served._beat, daemon=True).start()
    running = threading.Thread(target=engine.run, args=(served.deliver,))
    running.start()
    engine.send(Open(Ticket(1), SessionId("s"), ""))
    engine.send(Submit(Ticket(2), SessionId("s"), tuple(prompt(1, TOKENS)), SamplingParams(seed=0), StopRule(1)))
    was_long = False
    while True:
        data = ours.receive(SECONDS)
        assert data is not None
        frame = decode(data)
        if isinstance(frame, Beat):  # a layer goes on once it has been busy for long, and not for that of another
            is_long = frame.busy_s > (BEATS - 0.5) * host.BEAT_S
            if is_long and not was_long:
                stack.go.release()
            was_long = is_long
        elif isinstance(frame, list) and any(isinstance(event, TurnFinished) for event in frame):
            break
    engine.stop()
    running.join(SECONDS)
    assert stack.layers == tiny_llama.num_layers


FINISHED = TurnFinished(Ticket(1), FinishReason.LENGTH, TurnUsage(prompt_tokens=1, completion_tokens=1), 2)


class MadeUpChild:
    """A process that does what `live` does with its end of the channel, and then dies."""

    pid = 1

    def __init__(self, live: Callable[[Channel], None]) -> None:
        self.live = live
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


def served(
    lives: Iterator[Callable[[Channel], None]], timeout_s: float = SECONDS, stuck_s: float = math.inf
) -> EngineProcess:
    """An engine whose processes live one after the other as `lives` says, loaded."""
    start: Any = lambda: MadeUpChild(next(lives))  # noqa: E731
    engine = EngineProcess(timeout_s, start, stuck_s=stuck_s)
    engine.begin(Load.of(tiny_settings(), 0))
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
    told, reason = run(served(partial(load, info=info) for _ in range(100)))
    assert reason == "it died 5 times within 10 minutes, and no turn came to its end"
    assert [type(each) for each in told] == [Lost, Back] * (MOST - 1) + [Lost]


def test_engines_that_work_may_die_more_often(info: ModelInfo) -> None:
    numbers = iter(range(100))

    def work_and_die(channel: Channel) -> None:
        load(channel, info)
        if next(numbers) < 2 * MOST:
            channel.send(*encode_events([FINISHED]))

    told, _ = run(served(work_and_die for _ in range(100)))
    assert sum(isinstance(each, Lost) for each in told) == 2 * MOST + MOST - 1


def test_deaths_of_long_ago_do_not_count(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WITHIN_S", -1.0)  # all others are
    told = list[object]()
    with pytest.raises(StopIteration):  # there is no other life
        served(iter([partial(load, info=info)] * 3 * MOST)).run(told.extend)
    assert [type(each) for each in told].count(Lost) == 3 * MOST


@pytest.fixture
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is soon given up, and another follows at once."""
    for name, value in (("PAUSES_S", (0.0, 0.0)), ("LOOK_S", 0.05), ("LOADS", 0.0), ("STOP_TIMEOUT_S", 0.05)):
        monkeypatch.setattr(engine_module, name, value)


@pytest.mark.usefixtures("in_no_time")
def test_an_engine_that_never_ends_loading_is_given_up_for_another(info: ModelInfo) -> None:
    def hang(channel: Channel) -> None:
        while True:
            channel.receive(SECONDS)

    is_back = threading.Event()

    def stay(channel: Channel) -> None:
        load(channel, info)
        is_back.wait(SECONDS)

    engine = served(iter([partial(load, info=info), hang, stay]), 0.2)
    told = list[type]()

    def note(events: Sequence[Event | Replacement]) -> None:
        told.extend(map(type, events))
        if Back in told:
            engine.stop()
            is_back.set()

    engine.run(note)
    assert told == [Lost, Back]


@pytest.mark.usefixtures("in_no_time")
def test_an_engine_that_talks_on_and_never_stops_is_ended(info: ModelInfo) -> None:
    """A write to a disk that has stalled holds up its end, and nothing else of it."""

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


# When the server takes an engine for one that makes no progress, and when it trusts it again.

STUCK_S = 60.0


def heard(live: Callable[[Channel], None], until: int, *, stuck_s: float = STUCK_S) -> list[Event | Replacement]:
    """What the server is told of one process, which is stopped after so many pieces of news."""
    engine = served(iter([live]), stuck_s=stuck_s)
    found: list[Event | Replacement] = []

    def deliver(news: Sequence[Event | Replacement]) -> None:
        found.extend(news)
        if len(found) == until:
            engine.stop()

    engine.run(deliver)
    return found


@pytest.mark.usefixtures("in_no_time")
def test_an_engine_that_beats_and_computes_one_thing_for_ever_has_stalled(info: ModelInfo) -> None:
    def be_stuck(channel: Channel) -> None:
        load(channel, info)
        channel.send(encode(Beat(1.0)))
        channel.send(encode(Beat(3.0)))
        channel.send(*encode_events([FINISHED]))  # another thread of it says something
        channel.send(encode(Beat(0.0)))
        channel.receive(SECONDS)

    stuck, finished, goes_on = heard(be_stuck, 3, stuck_s=2.0)
    assert finished == FINISHED
    assert stuck == Stalled("it has been busy with one thing for 3 s", ends_turns=True)
    assert goes_on == GoesOn()
