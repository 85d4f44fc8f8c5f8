"""A step that the device may still be running: whole, or split where memory was too short for that."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from app.gpu.forward.activations import HostTensor
from app.gpu.forward.results import PendingResult, StepResult
from app.gpu.state.checkpoints import Captured
from app.gpu.state.paths import Record
from app.gpu.state.segments import Row


class LaunchedStep(Protocol):
    """A step under way."""

    @property
    def rows(self) -> list[Row]:
        """The rows as they were planned."""
        ...

    @property
    def done(self) -> bool:
        """Whether `collect` would return at once."""
        ...

    @property
    def tokens(self) -> Tensor | None:
        """The tokens that its rows sample, `[rows]` int64 on the device, for the step that is launched after it.

        None if the step was split.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the tokens."""
        ...


@dataclass(frozen=True, slots=True)
class WholeStep:
    """See `LaunchedStep`: all rows at once."""

    rows: list[Row]
    pending: PendingResult
    stopped: dict[Row, HostTensor] = field(default_factory=dict)
    captured: dict[Row, list[Captured]] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.pending.done

    @property
    def tokens(self) -> Tensor | None:
        return self.pending.tokens

    def collect(self) -> StepResult:
        result = self.pending.read()
        result.stopped.update(self.stopped)
        result.captured.update(self.captured)
        return result


@dataclass(frozen=True, slots=True)
class SplitStep:
    """See `LaunchedStep`: one piece after the other, whose rows may be cut from `rows`. Of the `unfit` rows not even
    one token has fitted.
    """

    rows: list[Row]
    pieces: list[WholeStep]
    unfit: set[Row]

    @property
    def done(self) -> bool:
        return all(piece.done for piece in self.pieces)

    @property
    def tokens(self) -> Tensor | None:
        return None

    def collect(self) -> StepResult:
        """See `LaunchedStep.collect`: the results of whole rows."""
        joined = StepResult(unfit=self.unfit)
        stopped: dict[Row, list[HostTensor]] = {}
        for result in [piece.collect() for piece in self.pieces]:
            joined.sampled.update((row.whole, sampled) for row, sampled in result.sampled.items())
            joined.broken.update(row.whole for row in result.broken)
            for row, scores in result.scores.items():
                joined.scores.setdefault(row.whole, []).extend(scores)
            for row, found in result.captured.items():
                joined.captured.setdefault(row.whole, []).extend(found)
            for row, hidden in result.stopped.items():
                stopped.setdefault(row.whole, []).append(hidden)
        joined.stopped.update((row, HostTensor.joined(hidden)) for row, hidden in stopped.items())
        joined.captured = {row: _join_captures(row, found) for row, found in joined.captured.items()}
        return joined


def _join_captures(row: Row, captured: Sequence[Captured]) -> list[Captured]:
    """One for each `Record` of the row, in their order, from those of its cuts."""
    found: dict[tuple[str, int], list[Captured]] = {}
    for each in captured:
        found.setdefault((each.breakpoint, each.layer), []).append(each)
    records = (step for step in row.path.steps if isinstance(step, Record))
    wanted = ((record.breakpoint, record.boundary - 1) for record in records)
    return [_join(found[key]) for key in wanted if key in found]


def _join(cuts: Sequence[Captured]) -> Captured:
    return Captured(
        cuts[0].breakpoint,
        cuts[0].layer,
        tuple(position for cut in cuts for position in cut.positions),
        tuple(token for cut in cuts for token in cut.token_ids),
        HostTensor.joined([cut.hidden for cut in cuts]),
    )
