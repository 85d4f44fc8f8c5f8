"""An engine on a thread of its own, as the server runs it, and a client of it on the calling thread, without HTTP; and
sessions that leave the device, so that nothing of them is left there, and come back."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import TracebackType
from typing import Self

from app.domain.breakpoints import NEXT_BREAKPOINT, Breakpoint, Until
from app.domain.errors import DjinnError
from app.domain.memory_map import MemoryMap, SessionMemory
from app.domain.values import Phase, SamplingParams, SessionId, StopRule, Ticket, Tier
from app.engine_process.executor import Engine
from app.messages import (
    Close,
    Command,
    Disarm,
    Done,
    Event,
    Failed,
    Inspect,
    Lost,
    Open,
    Paused,
    Placed,
    Replacement,
    Resume,
    SetPhase,
    Started,
    Submit,
    Token,
    TurnFinished,
)
from loadgen.errors import NotAsMeant

GREEDY = SamplingParams(seed=0, temperature=0)
SILENCE_S = 90.0
"""So long an engine may say nothing: the first step may have to compile kernels."""


@dataclass(slots=True)
class LiveTurn:
    """A turn, or what of it came after a pause. Times are on `time.perf_counter`, as the engine's thread read them."""

    session: SessionId
    sent_at: float
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    end: Paused | TurnFinished | None = None
    ended_at: float = 0.0
    restore_s: float = 0.0
    """Of its time in the queue, in which its KV came back."""
    error: DjinnError | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended, paused or failed."""
        return self.end is not None or self.error is not None


class LiveEngine:
    """Runs the engine while its block lasts, inside `around` on the engine's own thread. Calls wait for the answer and
    raise `NotAsMeant` if there is none.
    """

    def __init__(self, engine: Engine, around: AbstractContextManager[object] | None = None) -> None:
        self.info = engine.info
        self._engine = engine
        self._around = nullcontext() if around is None else around
        self._news: queue.SimpleQueue[tuple[float, Sequence[Event | Replacement]] | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="djinn-engine", daemon=True)
        self._tickets = map(Ticket, itertools.count(1))
        self._names = map("session-{}".format, itertools.count())
        self._turns: dict[Ticket, LiveTurn] = {}
        self._answers: dict[Ticket, object] = {}
        self._places: dict[SessionId, tuple[float, SessionMemory]] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._engine.stop()
        self._thread.join(SILENCE_S)

    def open(self, breakpoints: Sequence[Breakpoint] = (), namespace: str = "") -> SessionId:
        """A new session; KV is shared only with others of its namespace."""
        session = SessionId(next(self._names))
        self._do(lambda ticket: Open(ticket, session, namespace, breakpoints=tuple(breakpoints)))
        return session

    def close(self, *sessions: SessionId) -> None:
        """Close them."""
        for session in sessions:
            self._do(partial(Close, session=session))

    def disarm(self, session: SessionId) -> None:
        """Take all breakpoints."""
        self._do(lambda ticket: Disarm(ticket, session))

    def set_phase(self, session: SessionId, phase: Phase) -> float:
        """Say what the session does; returns when that was said."""
        said = time.perf_counter()
        self._do(lambda ticket: SetPhase(ticket, session, phase))
        return said

    def memory(self) -> MemoryMap:
        """What the engine says of its memory."""
        found = self._do(Inspect)
        assert isinstance(found, MemoryMap)
        return found

    def submit(
        self, session: SessionId, token_ids: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY
    ) -> LiveTurn:
        """Begin a turn of exactly so many tokens, unless its grammar ends it."""
        return self._begin(
            session, lambda ticket: Submit(ticket, session, tuple(token_ids), sampling, StopRule(max_tokens))
        )

    def resume(self, session: SessionId, until: Until = NEXT_BREAKPOINT) -> LiveTurn:
        """Go on with a paused turn."""
        return self._begin(session, lambda ticket: Resume(ticket, session, until))

    def finish(self, *turns: LiveTurn) -> None:
        """Wait until all of them have ended or paused. Raises `NotAsMeant` if one failed."""
        self.wait(lambda: all(turn.is_over for turn in turns))
        for turn in turns:
            if turn.error is not None:
                raise NotAsMeant(f"a turn failed: {turn.error.message}")

    def generate(self, session: SessionId, token_ids: Sequence[int], max_tokens: int = 1) -> LiveTurn:
        """Run a turn to its end or pause."""
        turn = self.submit(session, token_ids, max_tokens)
        self.finish(turn)
        return turn

    def generate_together(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[LiveTurn]:
        """Run a turn of a fresh session for each prompt, all at once."""
        sessions = [self.open() for _ in prompts]
        turns = [self.submit(session, prompt, max_tokens) for session, prompt in zip(sessions, prompts, strict=True)]
        self.finish(*turns)
        self.close(*sessions)
        return turns

    def place(self, session: SessionId) -> SessionMemory:
        """Where the session's KV was when the engine last spoke of it."""
        return self._places[session][1]

    def wait_for_tier(self, session: SessionId, tier: Tier) -> float:
        """When the session's KV was said to be there."""
        self.wait(lambda: session in self._places and self.place(session).tier is tier)
        return self._places[session][0]

    def wait(self, until: Callable[[], bool]) -> None:
        """Hear the engine out until that holds. Raises `NotAsMeant` if it dies, or says nothing for too long."""
        while not until():
            try:
                news = self._news.get(timeout=SILENCE_S)
            except queue.Empty:
                raise NotAsMeant(f"the engine has said nothing for {SILENCE_S:.0f} s") from None
            if isinstance(news, BaseException):
                raise NotAsMeant(f"the engine has died: {news}") from news
            for event in news[1]:
                self._take(news[0], event)

    def _do(self, make: Callable[[Ticket], Command]) -> object:
        ticket = next(self._tickets)
        self._engine.send(make(ticket))
        self.wait(lambda: ticket in self._answers)
        return self._answers.pop(ticket)

    def _begin(self, session: SessionId, make: Callable[[Ticket], Command]) -> LiveTurn:
        ticket = next(self._tickets)
        turn = self._turns[ticket] = LiveTurn(session, time.perf_counter())
        self._engine.send(make(ticket))
        return turn

    def _take(self, at: float, event: Event | Replacement) -> None:
        match event:
            case Started():
                self._turns[event.ticket].restore_s = event.restore_ms / 1e3
            case Token():
                turn = self._turns[event.ticket]
                turn.token_ids.append(event.token_id)
                turn.times.append(at)
            case Paused() | TurnFinished():
                # One that has paused and is then closed ends once more, as cancelled.
                turn = self._turns.pop(event.ticket, LiveTurn(SessionId(""), at))
                turn.end, turn.ended_at = event, at
            case Failed() if event.ticket in self._turns:
                turn = self._turns.pop(event.ticket)
                turn.error, turn.ended_at = event.error, at
            case Failed():
                raise NotAsMeant(f"the engine refused a command: {event.error.message}")
            case Done():
                self._answers[event.ticket] = event.value
            case Lost(reason):
                raise NotAsMeant(f"the engine has died: {reason}")
            case Placed():
                self._places[event.session] = at, event.memory

    def _run(self) -> None:
        try:
            with self._around:
                self._engine.run(self._deliver)
        except BaseException as error:
            self._news.put(error)

    def _deliver(self, events: Sequence[Event | Replacement]) -> None:
        """On the engine's thread: only noted, so that the client's work is not on the engine's clock."""
        self._news.put((time.perf_counter(), events))


BYTES = 256
"""Tokens that every byte-level vocabulary has."""
WHOLE = 0.9
"""Share of a session's KV that must have moved for it to have been away."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A move as the client sees it: from its signal to the news that the KV is there."""

    seconds: float
    bytes: int

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second."""
        return self.bytes / self.seconds / 1e9


def random_tokens(random: Random, count: int) -> list[int]:
    """A text that no other session has."""
    return [random.randrange(BYTES) for _ in range(count)]


def park(live: LiveEngine, session: SessionId) -> Moved:
    """Signal `io_wait`, and wait until the KV has left the device."""
    before = live.place(session).bytes_out
    said = live.set_phase(session, Phase.IO_WAIT)
    there = live.wait_for_tier(session, Tier.HOST)
    return Moved(there - said, live.place(session).bytes_out - before)


def fetch(live: LiveEngine, session: SessionId) -> Moved:
    """Signal `ready`, and wait until the KV is back on the device."""
    before = live.place(session).bytes_in
    said = live.set_phase(session, Phase.READY)
    there = live.wait_for_tier(session, Tier.DEVICE)
    return Moved(there - said, live.place(session).bytes_in - before)


def check_whole(live: LiveEngine, moved: Moved, tokens: int) -> None:
    """Raise `NotAsMeant` unless the KV of so many tokens moved: the rest was there already."""
    whole = tokens * live.info.kv_bytes_per_token
    if moved.bytes < WHOLE * whole:
        raise NotAsMeant(f"only {moved.bytes} of {whole} bytes moved")


class Passer:
    """A session as large as the device. A device keeps the blocks of a session that has left until somebody needs the
    room, and one that comes back soon would find them there: after this one has passed over it, it does not.
    """

    def __init__(self, live: LiveEngine, random: Random, device_tokens: int, block_tokens: int = 16) -> None:
        self._live = live
        self._session = live.open()
        # Less the one block that a prefetch leaves to a session that had a turn just before.
        live.generate(self._session, random_tokens(random, device_tokens - block_tokens))
        park(live, self._session)

    def pass_over(self) -> None:
        """Come to the device and leave it."""
        fetch(self._live, self._session)
        park(self._live, self._session)
