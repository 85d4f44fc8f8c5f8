"""Accounting for a step that has ended or failed: its turns advance, pause, end or fail."""

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch

from app.domain.errors import DjinnError, EngineError, FieldOutOfRange, WeightsLost
from app.gpu.device.hardware import check_alive
from app.gpu.forward.results import StepResult
from app.gpu.planning.turns import Turns
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence
from app.messages import Event

logger = logging.getLogger(__name__)


def finish_step(turns: Turns, rows: Sequence[Row], result: StepResult) -> Iterator[Event]:
    """Hand over what was captured, report scored prompts, and account for all rows. A row whose turn has ended since it
    was launched is passed over.
    """
    for row, captured in result.captured.items():
        for each in captured:
            turns.activations.capture(row.sequence, each)
    failed = result.broken | result.unfit
    for row, scores in result.scores.items():
        if row not in failed:
            yield from turns.score(row, scores)
    for row in rows:
        if row.sequence.turn is not row.turn:
            continue
        if row not in failed and row not in result.stopped:
            yield from turns.advance(row, result.sampled.get(row, ()))
        elif row in result.broken:
            message = "what the edits made of the residual stream led to logits that are not finite numbers"
            yield turns.fail(row.sequence, row.turn, FieldOutOfRange(message, param="edits"))
        elif row in result.unfit:
            message = f"memory is too short for one token of a session of {len(row.sequence.tokens)} tokens"
            yield turns.fail(row.sequence, row.turn, EngineError(message))
        else:
            yield from turns.pause(row, result.stopped[row])


def fail_step(turns: Turns, device: torch.device, rows: Sequence[Row], error: Exception) -> list[Event]:
    """End the turns of a step that has failed with `error`. Raises DeviceLost if all that follow would fail too."""
    check_alive(device, error)
    if isinstance(error, WeightsLost):
        logger.error("a step of %d rows failed: %s", len(rows), error.message)
        return fail_turns(turns, (row.sequence for row in rows), error)
    logger.error("a step of %d rows failed", len(rows), exc_info=error)
    return fail_turns(turns, (row.sequence for row in rows), EngineError(f"the step failed: {error}"))


def fail_planning(turns: Turns, sequence: TokenSequence, error: Exception) -> list[Event]:
    """End the turn that could not be planned, if it has not ended meanwhile."""
    logger.error("the turn of session %s could not be planned", sequence.session, exc_info=error)
    return fail_turns(turns, [sequence], EngineError(f"the turn could not be planned: {error}"))


def fail_turns(turns: Turns, sequences: Iterable[TokenSequence], error: DjinnError) -> list[Event]:
    """End the turns that these sequences have."""
    return [turns.fail(each, each.turn, error) for each in sequences if each.turn is not None]
