"""The engine thread: take commands, plan a step, run it, sample, emit events."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from app.domain import ModelInfo, TokenLogprobs
from app.errors import DjinnError, Draining, EngineError, FieldOutOfRange
from app.gpu.commands import CommandHandler
from app.gpu.kv_mover import KVMover
from app.gpu.kv_moves import Moved
from app.gpu.runner import Runner, StepResult
from app.gpu.sampler import sample, score_prompt
from app.gpu.scheduler import Scheduler
from app.gpu.segments import Row
from app.gpu.sequence import Sequence as EngineSequence
from app.gpu.turns import Turns, sample_request
from app.messages import Command, Event, Failed, Started

logger = logging.getLogger(__name__)


class Engine:
    """Owns every session's tokens and KV. `send` and `stop` may be called from any thread, the rest from one."""

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        runner: Runner,
        turns: Turns,
        handler: CommandHandler,
        mover: KVMover,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._placement = scheduler.placement
        self._runner = runner
        self._turns = turns
        self._handler = handler
        self._mover = mover
        self._inbox: queue.SimpleQueue[Command | Moved | None] = queue.SimpleQueue()
        """None asks the engine to stop."""
        self._stalled = False
        """Whether the last step had to wait for moves that are under way."""

    def send(self, command: Command) -> None:
        """Queue a command; its answer comes through `run`'s `deliver`."""
        self._inbox.put(command)

    def stop(self) -> None:
        """Make `run` return after the step that runs now; turns that have not ended fail as `Draining`."""
        self._inbox.put(None)

    def run(self, deliver: Callable[[Sequence[Event]], None]) -> None:
        """Work until `stop`: commands as they come, steps while any turn has tokens to compute."""
        self._mover.start(self._inbox.put)
        stopping = False
        while not stopping:
            messages, stopping = self._take_messages()
            events = [event for message in messages for event in self.handle(message)]
            self._placement.phases.tick()
            self._mover.submit(self._placement.take_orders())
            if self._scheduler.has_work and not stopping:
                events += self.step()
            events += self._handler.placed()
            if events:
                deliver(events)
        deliver(self._fail(self._handler.sequences, Draining("the server is shutting down")))
        self._mover.stop()

    def handle(self, command: Command | Moved) -> list[Event]:
        """Carry out one command, or account for a move; whatever goes wrong with a command is its answer."""
        if isinstance(command, Moved):
            return self._handler.moved(command)
        try:
            return self._handler.handle(command)
        except DjinnError as error:
            return [Failed(command.ticket, error)]
        except Exception as error:
            logger.exception("command %s failed", type(command).__name__)
            return [Failed(command.ticket, EngineError(f"the command failed: {error}"))]

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One token for every sequence that decodes, and a part of the prompts."""
        try:
            plan = self._scheduler.plan()
        except Exception as error:
            logger.exception("a step could not be planned")
            busy = [sequence for sequence in self._handler.sequences if sequence.busy]
            return self._fail(busy, EngineError(f"the step could not be planned: {error}"))
        events: list[Event] = [
            Started(sequence.turn.ticket, sequence.turn.cached_tokens or 0, sequence.turn.restore_ms)
            for sequence in plan.started
            if sequence.turn is not None
        ]
        try:
            self._runner.pool.copy_blocks(plan.copies)
            self._placement.write_behind(self._scheduler.running.values())
            self._mover.submit(self._placement.take_orders())  # after the copies: a move may read a block made by one
            self._stalled = not plan.rows and bool(self._placement.tiers.ledger.in_flight)
            if not plan.rows:
                return events
            events.extend(self._finish(plan.rows, self._runner.run(plan)))  # keeps what came before a failure
        except Exception as error:
            logger.exception("a step of %d rows failed", len(plan.rows))
            events += self._fail((row.sequence for row in plan.rows), EngineError(f"the step failed: {error}"))
        return events

    def _take_messages(self) -> tuple[list[Command | Moved], bool]:
        """All messages that have come, and whether to stop. Waits for one, or for a time to act, while nothing can be
        computed.
        """
        taken: list[Command | Moved] = []
        can_compute = self._scheduler.has_work and not self._stalled
        while True:
            try:
                message = self._inbox.get(block=not (taken or can_compute), timeout=self._until_alarm())
            except queue.Empty:
                return taken, False
            if message is None:
                return taken, True
            taken.append(message)

    def _until_alarm(self) -> float | None:
        alarm = self._placement.phases.next_alarm()
        return None if alarm is None else max(0.0, alarm - time.monotonic())

    def _finish(self, rows: Sequence[Row], result: StepResult) -> Iterator[Event]:
        """Report scored prompts, sample the rows that reached the end of their tokens, and account for all rows."""
        logits = result.logits
        last: list[int] = []
        broken: list[Row] = []
        end = 0
        for row in rows:
            start, end = end, end + row.outputs
            edited = row.way.new_edits or row.sequence.interventions
            if edited and not torch.isfinite(logits[start:end]).all():
                broken.append(row)
                logits[start:end] = 0.0
            elif row.scores_prompt:
                yield from self._turns.score(row, _score(row, logits[start:end]))
            if row.samples:
                last.append(end - 1)
        sampling = [sample_request(row.sequence) for row in rows if row.samples]
        wanted = logits if len(last) == len(logits) else logits[last]  # indexing would copy a vocabulary per row
        chosen = iter(sample(wanted, sampling) if sampling else ())
        for row in rows:
            stopped, token = result.stopped.get(row), next(chosen) if row.samples else None
            if row in broken:
                message = "what the edits made of the residual stream led to logits that are not finite numbers"
                yield self._turns.fail(row.sequence, FieldOutOfRange(message, param="edits"))
            elif stopped is not None:
                yield from self._turns.pause(row, stopped)
            else:
                yield from self._turns.advance(row, token)

    def _fail(self, sequences: Iterable[EngineSequence], error: DjinnError) -> list[Event]:
        return [self._turns.fail(sequence, error) for sequence in sequences if sequence.turn is not None]


def _score(row: Row, logits: Tensor) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens that follow each of the row's tokens in its history."""
    sequence = row.sequence
    assert sequence.turn is not None
    following = sequence.tokens[row.first + 1 : row.first + row.length + 1]
    return score_prompt(logits[: len(following)], following, sequence.turn.sampling.prompt_logprobs or 0)
