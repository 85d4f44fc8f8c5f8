"""Driving an engine without a thread: commands go in by hand, steps run until every turn has ended."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from app.domain import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.engine import Engine
from app.messages import Close, Command, Done, Event, Failed, Inspect, MemoryMap, Open, Submit, Token, TurnFinished

GREEDY = SamplingParams(seed=0, temperature=0)


class Driver:
    """A single-threaded client of an engine; raises the error of any command that fails."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: dict[Ticket, list[Event]] = {}
        self._tickets = map(Ticket, itertools.count(1))
        self._names = itertools.count()

    def ticket(self) -> Ticket:
        return next(self._tickets)

    def do(self, command: Command) -> object:
        """Carry out a command that is not a `Submit`; returns the value of its `Done`."""
        self.take(self.engine.handle(command))
        done = self.events[command.ticket][-1]
        assert isinstance(done, Done)
        return done.value

    def open(self) -> SessionId:
        session = SessionId(f"session-{next(self._names)}")
        self.do(Open(self.ticket(), session))
        return session

    def submit(
        self,
        session: SessionId,
        token_ids: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        *,
        replace: bool = False,
    ) -> Ticket:
        ticket = self.ticket()
        self.take(
            self.engine.handle(
                Submit(ticket, session, tuple(token_ids), sampling, StopRule(max_tokens), replace=replace)
            )
        )
        return ticket

    def finish(self, *turns: Ticket) -> None:
        """Step until these turns have ended."""
        while not all(self.ended(turn) for turn in turns):
            self.take(self.engine.step())

    def ended(self, turn: Ticket) -> bool:
        return any(isinstance(event, TurnFinished) for event in self.events.get(turn, []))

    def tokens(self, turn: Ticket) -> list[int]:
        return [event.token_id for event in self.events.get(turn, []) if isinstance(event, Token)]

    def end(self, turn: Ticket) -> TurnFinished:
        last = self.events[turn][-1]
        assert isinstance(last, TurnFinished)
        return last

    def generate(self, token_ids: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY) -> list[int]:
        """Generate in a session of its own."""
        session = self.open()
        turn = self.submit(session, token_ids, max_tokens, sampling)
        self.finish(turn)
        self.do(Close(self.ticket(), session))
        return self.tokens(turn)

    def memory(self) -> MemoryMap:
        found = self.do(Inspect(self.ticket()))
        assert isinstance(found, MemoryMap)
        return found

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            self.events.setdefault(event.ticket, []).append(event)
