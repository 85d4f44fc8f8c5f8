"""The engine thread: take commands, plan a step, run it, sample, emit events."""

import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from app.domain.errors import DjinnError, Draining, EngineError
from app.domain.values import ModelInfo, SessionId
from app.gpu.commands.dispatch import CommandHandler
from app.gpu.commands.message_queue import Message, MessageQueue
from app.gpu.forward.accounting import fail_planning, fail_step, fail_turns, finish_step
from app.gpu.forward.forward import Runner
from app.gpu.forward.results import LaunchedStep, SplitStep
from app.gpu.kv.loan import KVLoans
from app.gpu.kv.mover import KVMover
from app.gpu.kv.phases import Phases
from app.gpu.planning.overlap import plan_overlapped
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns, sample_requests
from app.gpu.state.moves import Moved
from app.gpu.state.segments import Row
from app.grammars.compiler import Grammars
from app.machine.cores import take_core
from app.messages import Command, Event, Failed, FreeDisk, Inspect, KeepKV, Paused, Restored, Started, TurnFinished

logger = logging.getLogger(__name__)

_ENDS = (TurnFinished, Paused, Failed)
"""Events after which a turn has no more rows."""


class Progress:
    """Whether the engine thread gets on. It changes this; another thread, which watches it, may read at any time."""

    def __init__(self) -> None:
        self.count = 0
        """Grows with each message, layer and step: it stands still while the thread is busy with one thing."""
        self.is_idle = True
        """Whether the thread waits for messages."""

    def note(self) -> None:
        """The thread begins something else."""
        self.count += 1
        self.is_idle = False

    def rest(self) -> None:
        """The thread has nothing to do until a message comes."""
        self.is_idle = True


class Engine:
    """Owns every session's tokens and KV. Any thread may call `send` and `stop`; one thread calls the rest."""

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        phases: Phases,
        runner: Runner,
        turns: Turns,
        handler: CommandHandler,
        mover: KVMover,
        loans: KVLoans | None,
        grammars: Grammars,
        progress: Progress,
        close: Callable[[], None],
    ) -> None:
        """`loans` give memory of KV back to weights; None: weights keep theirs. `progress` is noted by layers too.
        `close` is called when `run` ends.
        """
        self.info = info
        self.grammars = grammars
        self.progress = progress
        """Any thread may read it."""
        self._scheduler, self._turns, self._handler, self._runner = scheduler, turns, handler, runner
        self._placement, self._phases, self._mover, self._loans = scheduler.placement, phases, mover, loans
        self._close = close
        self.connections = mover.connections
        """Those to other servers, by the number that commands know each by. Any thread may use it."""
        self._messages = MessageQueue()
        self._numbers = itertools.count()
        """Of those that `give` has taken."""
        self._step: LaunchedStep | SplitStep | None = None
        """The step that the device runs."""
        self._overlapped: LaunchedStep | None = None
        """The step that is launched behind it, if there is one."""
        self._began_at = 0.0
        """On the clock of `time.perf_counter`, for the step that the device runs."""
        self._stalled = False
        """Whether the last step had to wait for moves that are under way."""
        self._outdated = False
        """Whether another plan could differ from the last one."""

    def send(self, command: Command) -> None:
        """Queue a command; its answer comes through `run`'s `deliver`."""
        self._messages.put(command)

    def give(self, connection: socket.socket) -> int:
        """Take over a connection to another server; returns the number that commands know it by. One thread calls
        it: numbers come in order.
        """
        number = next(self._numbers)
        self.connections.put(number, connection)
        return number

    def stop(self) -> None:
        """Make `run` return after the launched steps; turns that go on fail as `Draining`."""
        self._messages.close()

    def run(self, deliver: Callable[[Sequence[Event]], None]) -> None:
        """Work until `stop`: commands as they come, steps while any turn has tokens to compute.

        `deliver` wakes a thread, which then takes the GIL. A device must not wait for that between two steps, so the
        events of a step that runs at the same time are delivered once the next step runs. With streamed weights they
        are delivered at once: the launch of a step may wait for most of its copies, and the device has copies to make.
        """
        self._mover.start(self._messages.put)
        take_core()
        try:
            for events in self._work():
                if events:
                    deliver(events)
        finally:
            self._mover.stop()
            self.close()

    def close(self) -> None:
        """Release what outlives the engine's tensors; `run` does this when it ends."""
        self.grammars.close()
        self._runner.close()
        self._close()

    def _work(self) -> Iterator[list[Event]]:
        """Events, when they are to be delivered."""
        events: list[Event] = []
        while not self._messages.closed:
            self._take_messages()
            events += self._handle_messages()
            if self._step is None and self._scheduler.has_work and not self._messages.closed:
                events += self.launch()
            still_runs = self._step is not None and not self._step.done
            if still_runs:
                self._messages.drain()
                events += self._handle_messages()
                yield [*events, *self.overlap()]
                events = []
            if self._step is not None:
                events += self.collect()
            events += self._handler.placed()
            if self._loans is not None or not (still_runs and self._can_compute):
                yield events
                events = []
        events += self._handle_messages()  # messages that have waited for the last step
        yield [*events, *fail_turns(self._turns, self._handler.sequences, Draining("the server is shutting down"))]

    def handle(self, command: Message) -> list[Event]:
        """Carry out one command, or account for a move. A command that fails is answered by `Failed`."""
        if isinstance(command, Moved):
            self._mover.follow(command)
            return self._handler.moved(command)
        try:
            return self._handler.handle(command)
        except DjinnError as error:
            return [Failed(command.ticket, error)]
        except Exception as error:
            logger.exception("command %s failed", type(command).__name__)
            return [Failed(command.ticket, EngineError(f"the command failed: {error}"))]

    def step(self) -> list[Event]:
        """One token for every sequence that decodes, and a part of the prompts."""
        return [*self.launch(), *self.collect()]

    @torch.inference_mode()
    def launch(self) -> list[Event]:
        """Plan a step and launch it. Until `collect` no command or move of its sequences may be handled.

        An error of planning ends the turn that was looked at, and the step is what was planned before. An error that is
        about no turn ends all turns: it may have left any of them half planned.
        """
        self._began_at = time.perf_counter()
        self._outdated = False
        try:
            if self._loans is not None:
                self._loans.settle(idle=False)
            plan = self._scheduler.plan()
        except Exception as error:
            logger.exception("a step could not be planned")
            busy = [sequence for sequence in self._handler.sequences if sequence.busy]
            return fail_turns(self._turns, busy, EngineError(f"the step could not be planned: {error}"))
        events: list[Event] = [Started(turn.ticket, turn.cached_tokens or 0, turn.restore_ms) for turn in plan.started]
        if plan.failure is not None:
            events += fail_planning(self._turns, *plan.failure)
        try:
            self._runner.pool.copy_blocks(plan.copies)
            self._order_moves()  # after the copies: a move may read a block made by one
            # A message will come of a move that is under way, or of a prompt that another server computes.
            awaited = bool(self._placement.tiers.in_flight) or self._scheduler.queue.waits_for_others
            self._stalled = not plan.rows and plan.failure is None and awaited
            self._outdated |= plan.preempted or plan.skipped
            if plan.rows:
                self._step = self._runner.launch(plan.rows, sample_requests(plan.rows))
        except Exception as error:
            events += self._fail_step(plan.rows, error)
        return events

    @torch.inference_mode()
    def overlap(self) -> list[Event]:
        """Launch the next step before the running one has its tokens (overlap scheduling), if that changes nothing.

        No step is overlapped if a message waits, if another plan might run other rows, or if KV and weights lend memory
        to each other, which they do between steps.
        """
        step, rows = self._step, list[Row]()
        changes = self._outdated or self._messages.closed or not self._messages.is_empty or self._loans is not None
        if step is None or step.tokens is None or changes:
            return []
        try:
            plan = plan_overlapped(self._scheduler, step.rows, self._turns.max_model_len)
            rows = plan.rows
            if rows:
                self._order_moves()
                self._overlapped = self._runner.launch_overlapped(step, rows, sample_requests(rows))
        except Exception as error:  # an error of planning has no rows, and ends none: the next step is planned anew
            return [*self.collect(), *self._fail_step(rows, error)]
        if plan.failure is not None:
            return [*self.collect(), *fail_planning(self._turns, *plan.failure)]
        if rows and self._overlapped is None:  # memory is too short for two steps: release what was reserved
            self._scheduler.give_up(rows)
        return []

    @torch.inference_mode()
    def collect(self) -> list[Event]:
        """Wait for the running step, if there is one, and account for its rows."""
        step, self._step, self._overlapped = self._step, self._overlapped, None
        events: list[Event] = []
        if step is None:
            return events
        try:
            events.extend(finish_step(self._turns, step.rows, step.collect()))  # keeps what came before a failure
        except Exception as error:
            events += self._fail_step(step.rows, error)
        self._outdated |= any(isinstance(event, _ENDS) for event in events)
        now = time.perf_counter()
        self._placement.note_step(now - self._began_at)
        self._scheduler.drafting.note_step(step.rows, now - self._began_at)
        self._began_at = now
        return events

    def _fail_step(self, rows: Sequence[Row], error: Exception) -> list[Event]:
        return fail_step(self._turns, self._runner.stack.device, rows, error)

    def _order_moves(self) -> None:
        self._placement.write_behind(active.sequence for active in self._scheduler.queue.running.values())
        self._mover.submit(self._placement.take_orders())

    @property
    def _can_compute(self) -> bool:
        return self._step is not None or (self._scheduler.has_work and not self._stalled)

    def _take_messages(self) -> None:
        """Take all messages that have come. While nothing can be computed, wait for one or for the next alarm; before
        that, give memory of KV back to weights.
        """
        if not self._can_compute:
            loans = None if self._scheduler.has_work else self._loans
            while loans is not None and self._messages.is_empty and loans.settle(idle=True):
                self._mover.submit(self._placement.take_orders())
                self.progress.note()
            self.progress.rest()
            alarm = self._phases.next_alarm()
            seconds = None if alarm is None else max(0.0, alarm - time.monotonic())
            self._messages.wait(0.0 if self._handler.is_due else seconds)
        self.progress.note()
        self._messages.drain()

    def _handle_messages(self) -> list[Event]:
        """Handle the messages that have been taken, and order the moves that they and the time lead to.

        The first message for a sequence of the running step waits for `collect`, and so do all behind it.
        """
        events: list[Event] = []
        if self._messages.has_taken:  # most steps meet none, and to look through their rows takes time
            running = set() if self._step is None else {row.sequence.session for row in self._step.rows}
            for message in self._messages.take_while(lambda found: self._session_of(found) not in running):
                events += self.handle(message)
                self.progress.note()
                self._outdated = True
        self._phases.tick()
        events += self._handler.tick()
        self._mover.submit(self._placement.take_orders())
        return events

    def _session_of(self, message: Message) -> SessionId | None:
        """The session that a message changes; None if it changes none."""
        if isinstance(message, Moved):
            return self._placement.tiers.in_flight[message.number][1].session
        return None if isinstance(message, Restored | Inspect | FreeDisk | KeepKV) else message.session
