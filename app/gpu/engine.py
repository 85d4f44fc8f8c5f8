"""The engine thread: take commands, plan a step, run it, sample, emit events."""

import contextlib
import itertools
import logging
import queue
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from app.domain.errors import DjinnError, Draining, EngineError, FieldOutOfRange, WeightsLost
from app.domain.values import ModelInfo, SessionId
from app.gpu.commands.dispatch import CommandHandler
from app.gpu.device.hardware import check_alive
from app.gpu.forward.forward import Runner, StatesLost
from app.gpu.forward.results import LaunchedStep, SplitStep, StepResult
from app.gpu.kv.mover import KVMover
from app.gpu.kv.phases import Phases
from app.gpu.planning.admission import Borrower
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns, pauses_at, sample_requests
from app.gpu.state.checkpoints import Captured
from app.gpu.state.moves import Moved
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence
from app.grammars.compiler import Grammars
from app.machine.cores import take_core
from app.messages import Command, Event, Failed, Paused, ServerCommand, Started, TurnFinished

logger = logging.getLogger(__name__)

Message = Command | Moved

_ENDS = frozenset({TurnFinished, Paused, Failed})
"""Events after which a turn has no more rows."""


class MessageQueue:
    """Commands of other threads and reports of the mover. Any thread calls `put` and `close`, the engine's the rest."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        """None is the last."""
        self._taken: deque[Message] = deque()
        """Messages out of the queue that are not handled yet."""
        self.closed = False
        """Whether every message before `close` has been taken."""

    def put(self, message: Message) -> None:
        """Queue a message."""
        self._queue.put(message)

    def close(self) -> None:
        """Take no message that comes from now on."""
        self._queue.put(None)

    @property
    def is_empty(self) -> bool:
        """Whether no message waits to be handled; one may come at any moment."""
        return not self._taken and self._queue.empty()

    @property
    def has_taken(self) -> bool:
        """Whether messages have been taken that are not handled yet."""
        return bool(self._taken)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until there is a message to handle, or the time is over; None: without end."""
        if not self._taken:
            with contextlib.suppress(queue.Empty):
                self._take(self._queue.get(timeout=timeout_s))

    def drain(self) -> None:
        """Take all messages that have come."""
        with contextlib.suppress(queue.Empty):
            while not self.closed:
                self._take(self._queue.get_nowait())

    def take_while(self, wanted: Callable[[Message], bool]) -> Iterator[Message]:
        """Hand out the messages that have been taken, up to the first that is not wanted yet."""
        while self._taken and wanted(self._taken[0]):
            yield self._taken.popleft()

    def _take(self, message: Message | None) -> None:
        if message is None:
            self.closed = True
        else:
            self._taken.append(message)


class Progress:
    """Whether the engine thread makes progress. It changes this; the thread that watches it may read at any time."""

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
        borrower: Borrower | None,
        grammars: Grammars,
        progress: Progress,
        close: Callable[[], None],
    ) -> None:
        """`borrower` gives memory back to weights; None: they keep theirs. `close` is called when `run` ends."""
        self.info = info
        self.grammars = grammars
        self.progress = progress
        """Any thread may read it."""
        self._scheduler, self._turns, self._handler, self._runner = scheduler, turns, handler, runner
        self._placement, self._phases, self._mover, self._borrower = scheduler.placement, phases, mover, borrower
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
        """Take over a connection to another server; returns its number. One thread calls this: numbers rise."""
        number = next(self._numbers)
        self.connections.put(number, connection)
        return number

    def stop(self) -> None:
        """Make `run` return after the launched steps; turns that go on fail as `Draining`."""
        self._messages.close()

    def run(self, deliver: Callable[[Sequence[Event]], None]) -> None:
        """Work until `stop`: commands as they come, steps while any turn has tokens to compute.

        `deliver` wakes a thread, which then takes the GIL. A device must not wait for that between two steps, so events
        of a step are delivered once the next step runs; or at once where weights are streamed, which keeps it busy.
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
            if self._borrower is not None or not (still_runs and self._can_compute):
                yield events
                events = []
        events += self._handle_messages()  # messages that have waited for the last step
        yield [*events, *self._fail(self._handler.sequences, Draining("the server is shutting down"))]

    def handle(self, command: Message) -> list[Event]:
        """Carry out one command, or account for a move. A command that fails is answered by `Failed`."""
        if isinstance(command, Moved):
            self._mover.follow(command)
            return self._handler.moved(command)
        return self._handler.handle(command)

    def step(self) -> list[Event]:
        """One token for every sequence that decodes, and a part of the prompts."""
        return [*self.launch(), *self.collect()]

    @torch.inference_mode()
    def launch(self) -> list[Event]:
        """Plan a step and launch it. Until `collect` no command or move of its sequences may be handled.

        An error of planning ends the turn that was looked at, and the step is what was planned before. An error about
        no turn ends all, as it may have left any half planned.
        """
        self._began_at = time.perf_counter()
        self._outdated = False
        try:
            self._settle_loans(idle=False)
            plan = self._scheduler.plan()
        except Exception as error:
            logger.exception("a step could not be planned")
            busy = [sequence for sequence in self._handler.sequences if sequence.busy]
            return self._fail(busy, EngineError(f"the step could not be planned: {error}"))
        events: list[Event] = [Started(turn.ticket, turn.cached_tokens or 0, turn.restore_ms) for turn in plan.started]
        if plan.failure is not None:
            events += self._fail_planned(*plan.failure)
        try:
            self._runner.pool.copy_blocks(plan.copies)
            self._order_moves()  # after the copies: a move may read a block made by one
            # A message will come of a move that is under way, or of a prompt that another server computes.
            self._stalled = (
                not plan.rows
                and plan.failure is None
                and (bool(self._placement.tiers.in_flight) or self._scheduler.queue.waits_for_others)
            )
            self._outdated |= plan.preempted or plan.skipped
            if plan.rows:
                self._step = self._runner.launch(plan.rows, sample_requests(plan.rows))
        except StatesLost as error:
            logger.warning("%d rows recompute from kept states, because memory ran out: %s", len(plan.rows), error)
            for row in plan.rows:
                self._scheduler.cache.run_again(row.sequence)
        except Exception as error:
            events += self._fail_step(plan.rows, error)
        return events

    @torch.inference_mode()
    def overlap(self) -> list[Event]:
        """Launch the next step before the running one has its tokens (overlap scheduling), if that changes nothing: not
        if a message waits, another plan might run other rows, or KV and weights lend each other memory between steps.
        """
        step, rows = self._step, list[Row]()
        changes = self._outdated or self._messages.closed or not self._messages.is_empty or self._borrower is not None
        if step is None or step.tokens is None or changes:
            return []
        try:
            plan = self._scheduler.plan_overlapped(step.rows, self._turns.max_model_len)
            rows = plan.rows
            if rows:
                self._order_moves()
                self._overlapped = self._runner.launch_overlapped(step, rows, sample_requests(rows))
        except Exception as error:  # an error of planning has no rows, and ends none: the next step is planned anew
            return [*self.collect(), *self._fail_step(rows, error)]
        if plan.failure is not None:
            return [*self.collect(), *self._fail_planned(*plan.failure)]
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
        self._outdated |= not _ENDS.isdisjoint(map(type, events))
        now = time.perf_counter()
        self._placement.note_step(now - self._began_at)
        self._scheduler.drafting.note_step(step.rows, now - self._began_at)
        self._began_at = now
        return events

    def _fail_step(self, rows: Sequence[Row], error: Exception) -> list[Event]:
        """End the turns of a step that has failed. Raises DeviceLost if all that follow would fail too."""
        check_alive(self._runner.stack.device, error)
        known = error if isinstance(error, WeightsLost) else None
        logger.error("a step of %d rows failed: %s", len(rows), error, exc_info=None if known else error)
        return self._fail((row.sequence for row in rows), known or EngineError(f"the step failed: {error}"))

    def _fail_planned(self, sequence: TokenSequence, error: Exception) -> list[Event]:
        """End the turn that could not be planned, if it has not ended meanwhile."""
        logger.error("the turn of session %s could not be planned", sequence.session, exc_info=error)
        return self._fail([sequence], EngineError(f"the turn could not be planned: {error}"))

    def _fail(self, sequences: Iterable[TokenSequence], error: DjinnError) -> list[Event]:
        """End the turns that these sequences have."""
        return [self._turns.fail(each, error) for each in sequences if each.turn is not None]

    def _settle_loans(self, *, idle: bool) -> bool:
        """Give memory back to weights, if KV has borrowed more than it needs; returns whether some was given."""
        borrower = self._borrower
        return borrower is not None and borrower.settle(self._placement, self._scheduler.headroom, idle=idle)

    def _order_moves(self) -> None:
        self._placement.write_behind(self._scheduler.queue.running.values())
        self._mover.submit(self._placement.take_orders())

    @property
    def _can_compute(self) -> bool:
        return self._step is not None or (self._scheduler.has_work and not self._stalled)

    def _take_messages(self) -> None:
        """Take all messages that have come. With nothing to compute, give weights their memory back, then wait."""
        if not self._can_compute:
            while not self._scheduler.has_work and self._messages.is_empty and self._settle_loans(idle=True):
                self._mover.submit(self._placement.take_orders())
                self.progress.note()
            self.progress.rest()
            alarm = self._phases.next_alarm()
            seconds = None if alarm is None else max(0.0, alarm - time.monotonic())
            self._messages.wait(0.0 if self._handler.is_looking else seconds)
        self.progress.note()
        self._messages.drain()

    def _handle_messages(self) -> list[Event]:
        """Handle the messages that have been taken, and order the moves that they and the time lead to. The first one
        for a sequence of the running step waits for `collect`, and so do all behind it.
        """
        events: list[Event] = []
        if self._messages.has_taken:  # most steps meet none, and to look through their rows takes time
            running = set() if self._step is None else {row.sequence.session for row in self._step.rows}
            for message in self._messages.take_while(lambda found: self._session_of(found) not in running):
                events += self.handle(message)
                self.progress.note()
                self._outdated = True
        events += self._handler.go_on(is_busy=self._can_compute)
        self._mover.submit(self._placement.take_orders())
        return events

    def _session_of(self, message: Message) -> SessionId | None:
        """The session that a message changes; None if it changes none."""
        if isinstance(message, Moved):
            return self._placement.tiers.in_flight[message.number][1].session
        return None if isinstance(message, ServerCommand) else message.session


def _why_broken(row: Row) -> DjinnError:
    """Why there are logits that are not numbers."""
    if row.path.new_edits or row.sequence.interventions:
        return FieldOutOfRange("with these edits the logits are NaN or infinite", param="edits")
    return EngineError(
        f"after token {row.end - len(row.draft)} the model's logits are not finite numbers: NaN or infinity is in its "
        "weights or adapter, or a number became too large for the type that it computes in"
    )


def finish_step(turns: Turns, rows: Sequence[Row], result: StepResult) -> Iterator[Event]:
    """Account for the rows of a step that has ended: hand over captures, report scored prompts, and let their turns
    advance, pause, end or fail. A row whose turn has ended since it was launched is passed over.
    """
    failed, halted = result.broken | result.unfit, dict[Row, Captured]()
    for row, captured in result.captured.items():
        for each in captured:
            if each.reads is not None and row not in failed and row.sequence.turn is row.turn:
                told, halts = turns.read(row, each, stopped=row in result.stopped)
                yield from told
                if halts:
                    halted.setdefault(row, each)
        for each in captured:
            if each.reads is None and not (row in halted and row not in result.stopped and pauses_at(halted[row])):
                yield from turns.capture(row, each)
    for row, scores in result.scores.items():
        if row not in failed:
            yield from turns.score(row, scores)
    others, sampled = failed.union(halted, result.stopped), result.sampled
    for row in rows:
        if row.sequence.turn is not row.turn:
            continue
        if row not in others:
            yield from turns.advance(row, sampled.get(row, ()))
        elif row in halted and (halt := turns.halt(row, halted[row], stopped=row in result.stopped)) is not None:
            yield from halt
        elif row in result.broken:
            yield turns.fail(row.sequence, _why_broken(row))
        elif row in result.unfit:
            message = f"memory is too short for one token of a session of {len(row.sequence.tokens)} tokens"
            yield turns.fail(row.sequence, EngineError(message))
        else:
            yield from turns.pause(row, *result.stopped[row])
