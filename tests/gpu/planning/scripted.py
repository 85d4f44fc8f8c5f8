"""Clients that follow a script, and an engine that hears of them, and of its moves, at any moment: also in mid-step.

Everything runs on one thread and is chosen by a seed, so that what fails once fails again.
"""

import itertools
import queue
import random
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from app.domain.values import Ticket
from app.gpu.device.streams import Event as DeviceEvent
from app.gpu.engine import Engine
from app.gpu.kv.mover import KVMover
from app.gpu.state.moves import Move, Moved
from app.messages import Command, Done, Event, Failed, Notice, Paused, Started, Token, TurnFinished

MakeCommand = Callable[[Ticket], Command]
Script = Generator["MakeCommand | Interrupted", list[Event], None]
"""Yields its next command; receives what was said under its ticket, once it has ended."""


@dataclass(frozen=True)
class Interrupted:
    """A turn that its client interrupts when it has seen so many tokens, or 0: when it has started, with a command that
    is made from a ticket and that of the turn.
    """

    submit: MakeCommand
    tokens: int
    interrupt: Callable[[Ticket, Ticket], Command]


@dataclass
class _Client:
    script: Script
    said: list[Event] = field(default_factory=list)
    waits_for: set[Ticket] = field(default_factory=set)
    interrupted: Interrupted | None = None


class Play:
    """Runs an engine until every script has ended. Stands in for its message queue and for its mover."""

    def __init__(
        self,
        engine: Engine,
        scripts: Iterable[Script],
        seed: int,
        on_events: Callable[[Engine, Sequence[Event]], None] = lambda engine, events: None,
    ) -> None:
        """`on_events` sees what clients are told before they do."""
        self._engine = engine
        self._on_events = on_events
        self._stopped = False
        self._random = random.Random(seed)
        self._mover = engine._mover
        self.follow = engine._mover.follow
        self._tickets = map(Ticket, itertools.count(1))
        self._clients = [_Client(script) for script in scripts]
        self._of: dict[Ticket, _Client] = {}
        self._commands: list[Command] = []
        self._reports: list[Moved] = []
        self._orders: list[tuple[Move, DeviceEvent]] = []
        self._given: list[Command | Moved] = []
        self.handled_in_flight = 0
        """Messages that the engine has handled while its device ran a step."""
        self._handle = engine.handle
        engine.handle = self._check_and_handle  # type: ignore[method-assign, assignment]
        engine._messages._queue = cast("queue.SimpleQueue[Any]", self)
        engine._mover = cast("KVMover", self)

    @property
    def engine(self) -> Engine:
        return self._engine

    def run(self) -> None:
        """Raises the error of any command that fails."""
        for client in self._clients:
            self._go_on(client)
        self._engine.run(self._deliver)

    def put(self, message: Moved | None) -> None:
        """A move has ended, or the engine is to stop."""
        if message is None:
            self._stopped = True
        else:
            self._reports.append(message)

    def get(self, timeout: float | None) -> Command | Moved | None:
        """The engine has nothing else to do."""
        while self._orders and self._random.random() < 0.8:
            self._carry_out()
        while (message := self._choose()) is None and self._orders:
            self._carry_out()
        if message is None and self._open:
            assert timeout is not None, "nobody has anything to do, and not all have done what they wanted"
            raise queue.Empty
        return self._give(message)

    def get_nowait(self) -> Command | Moved | None:
        """The engine has other things to do: perhaps there is a message."""
        if self._stopped:
            return None
        message = self._choose() if self._random.random() < 0.6 else None
        if message is None and (self._open or self._commands or self._reports):
            raise queue.Empty
        return self._give(message)

    def empty(self) -> bool:
        """Whether the engine sees no message; one that has just come may show a moment later."""
        return not (self._commands or self._reports) or self._random.random() < 0.4

    def start(self, report: Callable[[Moved], None]) -> None:
        """There are no workers: moves are done when they are chosen."""

    def stop(self) -> None:
        """Nothing to end."""

    def submit(self, moves: Iterable[Move]) -> None:
        """Some are done now, the others later."""
        self._orders += [(move, self._mover._host.now()) for move in moves]
        while self._orders and self._random.random() < 0.3:
            self._carry_out()

    def _carry_out(self) -> None:
        """Do the first order of one of the workers."""
        kinds = {move.kind for move, _ in self._orders}
        kind = self._random.choice(sorted(kinds))
        order = next(order for order in self._orders if order[0].kind is kind)
        self._orders.remove(order)
        report = self._mover.carry_out(*order)
        assert report.error is None, report.error
        self.put(report)

    def _give(self, message: Command | Moved | None) -> Command | Moved | None:
        if message is not None:
            self._given.append(message)
        return message

    def _check_and_handle(self, message: Command | Moved) -> list[Event]:
        """Messages are handled in their order, and none while a step runs its session."""
        assert self._given.pop(0) is message
        step = self._engine._step
        if step is not None:
            self.handled_in_flight += 1
            assert self._engine._session_of(message) not in {row.sequence.session for row in step.rows}
        return self._handle(message)

    @property
    def _open(self) -> bool:
        return any(client.waits_for for client in self._clients)

    def _choose(self) -> Command | Moved | None:
        """One of the messages that have come. What one client sends is never two messages that depend on order."""
        waiting: list[list[Any]] = [each for each in (self._commands, self._reports) if each]
        return self._random.choice(waiting).pop(0) if waiting else None

    def _deliver(self, events: Sequence[Event]) -> None:
        self._on_events(self._engine, events)
        for event in events:
            if isinstance(event, Notice):
                continue
            client = self._of.get(event.ticket)
            if client is None:
                continue
            if isinstance(event, Failed):
                raise event.error
            client.said.append(event)
            tokens = sum(isinstance(each, Token) for each in client.said)
            plan = client.interrupted
            if plan is not None and isinstance(event, Started | Token) and tokens == plan.tokens:
                self._send(client, plan.interrupt(next(self._tickets), event.ticket))
            if isinstance(event, Done | TurnFinished | Paused):
                client.waits_for.discard(event.ticket)
                if not client.waits_for:
                    self._go_on(client)

    def _go_on(self, client: _Client) -> None:
        said, client.said, client.interrupted = client.said, [], None
        try:
            wanted = client.script.send(said) if said else next(client.script)
        except StopIteration:
            return
        if isinstance(wanted, Interrupted):
            client.interrupted, wanted = wanted, wanted.submit
        self._send(client, wanted(next(self._tickets)))

    def _send(self, client: _Client, command: Command) -> None:
        self._of[command.ticket] = client
        client.waits_for.add(command.ticket)
        self._commands.append(command)
