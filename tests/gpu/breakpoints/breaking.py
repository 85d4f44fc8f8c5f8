"""Driving an engine whose turns pause: every block is counted after every command and every step."""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from app.domain.activations import Activation, Captures, CheckpointInfo
from app.domain.breakpoints import (
    ALL,
    MAX_WORK,
    NEXT_BREAKPOINT,
    Action,
    Breakpoint,
    Edit,
    EditOp,
    OnTimeout,
    Positions,
    Until,
    When,
)
from app.domain.memory_map import StackUse
from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.engine import Engine
from app.gpu.planning.queue import StepPlan
from app.gpu.state.segments import Segment, cut_segments
from app.gpu.state.sequence import ActivationRoom
from app.messages import (
    Arm,
    Cancel,
    Disarm,
    EditCheckpoint,
    Event,
    Fork,
    Paused,
    ReadCaptures,
    ReadCheckpoint,
    Resume,
    Submit,
    Token,
    TurnFinished,
)
from tests.gpu.breakpoints.breaking_models import prompt
from tests.gpu.breakpoints.breaking_oracle import tensor_of
from tests.gpu.driving import GREEDY, Driver

MAX_STEPS = 20_000
SAME = tuple(Edit(EditOp.SCALE, 1.0) for _ in range(16))


@dataclass
class Turn:
    """A turn and its pauses: each time that it is resumed, it goes on under another ticket."""

    events: dict[Ticket, list[Event]]
    session: SessionId
    tickets: list[Ticket]

    @property
    def last(self) -> Event | None:
        """What was last said under the ticket that it now has."""
        said = self.events.get(self.tickets[-1])
        return said[-1] if said else None

    @property
    def paused(self) -> bool:
        return isinstance(self.last, Paused)

    @property
    def checkpoint(self) -> CheckpointInfo:
        assert isinstance(self.last, Paused)
        return self.last.checkpoint

    @property
    def end(self) -> TurnFinished:
        assert isinstance(self.last, TurnFinished)
        return self.last

    @property
    def rests(self) -> bool:
        return isinstance(self.last, Paused | TurnFinished)

    @property
    def tokens(self) -> list[int]:
        """Generated so far, over all pauses."""
        return [event.token_id for event in self.said if isinstance(event, Token)]

    @property
    def said(self) -> list[Event]:
        """All that the client was told, over all pauses."""
        return [event for ticket in self.tickets for event in self.events.get(ticket, [])]


class BreakDriver(Driver):
    """A single-threaded client of an engine that follows pauses."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.plans: list[StepPlan] = []
        self._plan = self.scheduler.plan
        self.scheduler.plan = self._record_plan  # type: ignore[method-assign]
        self._breakpoints = itertools.count(1)

    def take(self, events: Sequence[Event]) -> None:
        self.check()
        super().take(events)

    def check(self) -> None:
        """Every checkpoint and capture is accounted for too."""
        super().check()
        sequences = self.handler.sequences
        checkpoints = [s.checkpoint.nbytes for s in sequences if s.checkpoint is not None]
        captures = {s.session: s.captures.nbytes for s in sequences if s.captures.nbytes}
        held = StackUse(len(checkpoints), sum(checkpoints), sum(captures.values()), captures)
        assert self.activations.use() == held

    def arm(
        self,
        session: SessionId,
        *layers: int,
        action: Action = Action.PAUSE,
        when: When = When(),  # noqa: B008 (frozen)
        edits: tuple[Edit, ...] = (),
        once: bool = False,
        **more: Any,
    ) -> Breakpoint:
        made = Breakpoint(
            f"bp_{next(self._breakpoints):016x}", layers, action, when, edits, once, 600.0, OnTimeout.RESUME, **more
        )
        self.do(Arm(self.ticket(), session, made))
        return made

    def open_armed(self, *layers: int, **armed: Any) -> SessionId:
        """A session with one breakpoint, as `arm` takes it."""
        session = self.open()
        self.arm(session, *layers, **armed)
        return session

    def arm_all(self, session: SessionId, when: When = When()) -> None:  # noqa: B008 (frozen)
        """All the work that a session may have in a step of four layers, and none of it changes a token."""
        for _ in range(MAX_WORK // (4 * len(SAME))):
            self.arm(session, 0, 1, 2, 3, action=Action.EDIT, edits=SAME, when=when)

    def disarm(self, session: SessionId, made: Breakpoint | None = None) -> None:
        """Remove this breakpoint, or all."""
        self.do(Disarm(self.ticket(), session, None if made is None else made.id))

    def begin(
        self,
        session: SessionId,
        token_ids: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        *,
        stop: StopRule | None = None,
        **more: Any,
    ) -> Turn:
        """Submit a turn; nothing of it has run yet."""
        ticket, rule = self.ticket(), stop or StopRule(max_tokens)
        command = Submit(ticket, session, tuple(token_ids), sampling, rule, **more)
        self.take(self.engine.handle(command))
        return Turn(self.events, session, [ticket])

    def turn(self, session: SessionId, token_ids: Sequence[int], *asked: Any, **more: Any) -> Turn:
        """A turn, as `begin` takes it, that has paused or ended."""
        turn = self.begin(session, token_ids, *asked, **more)
        self.settle(turn)
        return turn

    def fill(self, length: int = 70) -> None:
        """Run a turn that needs nearly all of a device with 20 blocks: sessions that rest give way."""
        session = self.open()
        self.turn(session, prompt(50, length), 2)
        self.close(session)

    def resume(self, turn: Turn, until: Until = NEXT_BREAKPOINT) -> None:
        ticket = self.ticket()
        self.take(self.engine.handle(Resume(ticket, turn.session, until)))
        turn.tickets.append(ticket)

    def go_on(self, turn: Turn, until: Until = NEXT_BREAKPOINT) -> None:
        """Resume the turn until it has paused again or ended."""
        self.resume(turn, until)
        self.settle(turn)

    def settle(self, *turns: Turn) -> None:
        """Step until each of the turns has paused or ended."""
        for _ in range(MAX_STEPS):
            if all(turn.rests for turn in turns):
                return
            self.advance()
        raise AssertionError("the turns do not come to rest")

    def run(self, turn: Turn, until: Until = NEXT_BREAKPOINT) -> list[CheckpointInfo]:
        """Resume the turn from every pause until it ends; returns where it paused."""
        self.settle(turn)
        pauses = []
        while turn.paused:
            pauses.append(turn.checkpoint)
            self.go_on(turn, until)
        return pauses

    def run_together(self, turns: Iterable[Turn], chance: random.Random) -> None:
        """Step while turns pause, each of them for a few steps."""
        unfinished = list(turns)
        for _ in range(MAX_STEPS):
            unfinished = [turn for turn in unfinished if not isinstance(turn.last, TurnFinished)]
            if not unfinished:
                return
            for turn in unfinished:
                if turn.paused and chance.random() < 0.6:
                    self.resume(turn)
            self.advance()
        raise AssertionError("the turns do not end")

    def fork(self, turn: Turn) -> Turn:
        """Fork the session of a paused turn; returns the child's turn."""
        child, ticket = SessionId(f"child-{next(self._names)}"), self.ticket()
        self.do(Fork(self.ticket(), turn.session, child, ticket))
        self.events.setdefault(ticket, []).append(turn.events[turn.tickets[-1]][-1])
        return Turn(self.events, child, [*turn.tickets, ticket])

    def cancel(self, turn: Turn, keep: int | None = None) -> int:
        """End the turn; returns the length of the history."""
        length = self.do(Cancel(self.ticket(), turn.session, turn.tickets[-1], keep))
        assert isinstance(length, int)
        return length

    def edit(self, turn: Turn, *edits: Edit) -> None:
        self.do(EditCheckpoint(self.ticket(), turn.session, edits))

    def read(self, turn: Turn, positions: Positions = ALL) -> Tensor:
        """The checkpoint's residual stream, `[positions, hidden]`."""
        found = self.do(ReadCheckpoint(self.ticket(), turn.session, positions))
        assert isinstance(found, Activation)
        assert found.tensor.shape[0] == found.end - found.first
        return tensor_of(found.tensor)

    def captures(self, session: SessionId) -> Captures:
        read = self.do(ReadCaptures(self.ticket(), session))
        assert callable(read)
        found = read()
        assert isinstance(found, Captures)
        return found

    @property
    def activations(self) -> ActivationRoom:
        return self.engine._turns.activations

    def segments(self) -> list[list[Segment]]:
        """Of every step with rows so far."""
        return [cut_segments(plan.rows) for plan in self.plans if plan.rows]

    def _record_plan(self) -> StepPlan:
        plan = self._plan()
        self.plans.append(plan)
        return plan
