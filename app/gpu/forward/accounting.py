"""Accounting for a step that has ended or failed: its turns advance, pause, end or fail."""

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch

from app.domain.errors import DjinnError, EngineError, FieldOutOfRange, WeightsLost
from app.gpu.device.health import check_alive
from app.gpu.forward.results import StepResult
from app.gpu.planning.turns import Turns
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence
from app.messages import Event

logger = logging.getLogger(__name__)


class Accounting:
    """Advances, pauses and fails turns."""

    def __init__(self, turns: Turns, device: torch.device) -> None:
        self._turns = turns
        self._device = device

    def finish(self, rows: Sequence[Row], result: StepResult) -> Iterator[Event]:
        """Hand over what was captured, report scored prompts, and account for all rows. A row whose turn has ended
        since it was launched is passed over.
        """
        for row, captured in result.captured.items():
            for each in captured:
                self._turns.activations.capture(row.sequence, each)
        for row, scores in result.scores.items():
            if row not in result.broken | result.unfit:
                yield from self._turns.score(row, scores)
        is_plain = not (result.broken or result.unfit or result.stopped)
        for row in rows:
            if row.sequence.turn is row.turn:
                sampled = result.sampled.get(row, ())
                yield from self._turns.advance(row, sampled) if is_plain else self._finish_row(row, result)

    def fail_step(self, rows: Sequence[Row], error: Exception) -> list[Event]:
        """End the turns of a step that has failed with `error`. Raises DeviceLost if all that follow would fail too."""
        check_alive(self._device, error)
        if isinstance(error, WeightsLost):
            logger.error("a step of %d rows failed: %s", len(rows), error.message)
            return self.fail((row.sequence for row in rows), error)
        logger.error("a step of %d rows failed", len(rows), exc_info=error)
        return self.fail((row.sequence for row in rows), EngineError(f"the step failed: {error}"))

    def fail_turn(self, sequence: TokenSequence, error: Exception) -> list[Event]:
        """End the turn that could not be planned, if it has not ended meanwhile."""
        logger.error("the turn of session %s could not be planned", sequence.session, exc_info=error)
        return self.fail([sequence], EngineError(f"the turn could not be planned: {error}"))

    def fail(self, sequences: Iterable[TokenSequence], error: DjinnError) -> list[Event]:
        """End the turns that these sequences have."""
        return [self._turns.fail(each, each.turn, error) for each in sequences if each.turn is not None]

    def _finish_row(self, row: Row, result: StepResult) -> list[Event]:
        stopped = result.stopped.get(row)
        if row in result.broken:
            message = "what the edits made of the residual stream led to logits that are not finite numbers"
            return [self._turns.fail(row.sequence, row.turn, FieldOutOfRange(message, param="edits"))]
        if row in result.unfit:
            message = f"memory is too short for one token of a session of {len(row.sequence.tokens)} tokens"
            return [self._turns.fail(row.sequence, row.turn, EngineError(message))]
        if stopped is not None:
            return self._turns.pause(row, stopped)
        return self._turns.advance(row, result.sampled.get(row, ()))
