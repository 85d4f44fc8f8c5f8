"""A step that the device may still be running, and its results: next tokens, prompt scores, what rows left behind."""

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from app.domain.values import TokenLogprobs
from app.gpu.device.streams import PASSED, DeviceStreams, Event, Put, fetch
from app.gpu.forward.boundary import BoundaryActions, HostTensor, Stopped
from app.gpu.forward.inputs import Places, place_runs
from app.gpu.sampling import Sampled, SampleRequest
from app.gpu.sampling.sampler import Mask, ReadReport, choose, log_probabilities, place_requests, report
from app.gpu.state.checkpoints import Captured
from app.gpu.state.paths import Record
from app.gpu.state.segments import Row


@dataclass(slots=True)
class StepResult:
    """Results of a step's rows. A row is `broken`, whatever else it has, if logits that it needs are not numbers."""

    sampled: dict[Row, list[Sampled]] = field(default_factory=dict)
    """Each row's next token, and those chosen after its drafted tokens, up to where logits are not numbers."""
    scores: dict[Row, list[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities of the prompt tokens that follow each of the row's tokens."""
    stopped: dict[Row, Stopped] = field(default_factory=dict)
    """What is kept of each row that pauses."""
    captured: dict[Row, list[Captured]] = field(default_factory=dict)
    """Captures of breakpoints, lowest boundary first."""
    broken: set[Row] = field(default_factory=set)
    unfit: set[Row] = field(default_factory=set)
    """Rows that memory was too short for, one token at a time."""


class LaunchedStep:
    """A step of `rows`, all at once. Made before the step is launched: `put` takes to the device what `launch` needs
    there. `requests` are for the `choices` of each row in order. Masks of grammars are computed on `mask_thread`.
    """

    def __init__(
        self,
        rows: list[Row],
        requests: Sequence[SampleRequest],
        vocab_size: int,
        streams: DeviceStreams,
        put: Put,
        mask_thread: Executor,
    ) -> None:
        self.rows = rows
        self.tokens: Tensor | None = None
        """The chosen tokens, if any, `[requests]` int64 on the device, for what is launched from now on."""
        self._requests, self._streams = requests, streams
        self._actions: BoundaryActions | None = None
        self._done: Event = PASSED
        self._next_tokens: dict[Row, Tensor] = {}
        """Of rows that score a prompt: the tokens that follow each of theirs in the history; its last has none."""
        self._scores: dict[Row, ReadReport] = {}
        self._choosing: Places | None = None
        """Which logits choose a token, where some do not."""
        scoring = [row for row in rows if row.scores_prompt]
        if scoring:
            ends = np.cumsum([row.outputs for row in rows]).tolist()
            self._spans = {row: slice(end - row.outputs, end) for row, end in zip(rows, ends, strict=True)}
            """Where in the step's logits each row's are."""
        for row in scoring:
            following = row.sequence.tokens[row.first + 1 : row.first + row.length + 1]
            self._next_tokens[row] = put(np.array(following, np.int64))
        if scoring:
            self._choosing = place_runs([(end - row.choices, end) for row, end in zip(rows, ends, strict=True)], put)
        self._inputs = place_requests(requests, vocab_size, put)
        self._reporting = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
        self._reported = put(np.array(self._reporting, np.int64)) if self._reporting else None
        self._report: ReadReport = list
        matchers = {i: request.matcher for i, request in enumerate(requests) if request.matcher is not None}
        self._mask = Mask(matchers, vocab_size, streams, put, mask_thread) if matchers else None

    def abandon(self) -> None:
        """The step will not run: give the matchers of its grammars back."""
        if self._mask is not None:
            self._mask.abandon()

    def launch(self, logits: Tensor, actions: BoundaryActions | None = None) -> None:
        """Launch the work on the step's logits, `[outputs, vocab_size]`, in place. Waits for the masks of grammars."""
        self._actions = actions
        for row, next_tokens in self._next_tokens.items():
            count, top = len(next_tokens), row.turn.sampling.prompt_logprobs or 0
            scored = log_probabilities(logits[self._spans[row]][:count])
            self._scores[row] = report(scored, next_tokens, [top] * count, self._streams) if count else list
        if self._requests:
            logits = logits if self._choosing is None else logits[self._choosing]
            raw = None if self._reported is None else log_probabilities(logits[self._reported])
            if self._mask is not None:
                self._mask.apply(logits)
            self.tokens, highest = choose(logits, self._inputs, on_host=self._streams.on_host)
            if self._mask is not None:  # a grammar may leave a row without a token: its logits are all minus infinity
                highest.index_copy_(0, self._mask.rows, highest[self._mask.rows].clamp(min=0.0))
            # One copy: a token that was chosen among logits that are no numbers is its complement.
            self._chosen = fetch(self._streams, torch.where(highest.abs() < math.inf, self.tokens, ~self.tokens))
            if raw is not None:
                tops = [self._requests[i].params.logprobs or 0 for i in self._reporting]
                self._report = report(raw, self.tokens[self._reported], tops, self._streams)
        if self._next_tokens or self._requests:
            self._done = self._streams.compute.record()

    @property
    def half_states(self) -> dict[Row, HostTensor]:
        """By planned row, the states that layers below a pause have left."""
        stopped = {} if self._actions is None else self._actions.stopped
        return {row.whole: kept.states for row, kept in stopped.items() if kept.states is not None}

    @property
    def done(self) -> bool:
        """Whether `collect` would return at once. True from the beginning for a step without outputs."""
        return self._done.query()

    def collect(self) -> StepResult:
        """Wait until the step is over."""
        self._done.synchronize()
        result = StepResult()
        if self._actions is not None:
            result.stopped, result.captured = self._actions.stopped, self._actions.captured
        for row, read in self._scores.items():
            result.scores[row] = read()
            if any(math.isnan(score.logprob) for score in result.scores[row]):
                result.broken.add(row)
        if self._requests:
            chosen, sampled, end = self._chosen.tolist(), self.sampled(), 0
            has_odd = min(chosen) < 0
            for row in self.rows:
                if row.samples:
                    begin, end = end, end + 1 + len(row.draft)
                    good = end
                    if has_odd:  # tokens before it are told, as without a draft
                        good = next((place for place in range(begin, end) if chosen[place] < 0), end)
                    result.sampled[row] = sampled[begin:good]
                    if good == begin:
                        result.broken.add(row)
        return result

    def sampled(self) -> list[Sampled]:
        """One token per request, once the step is over; of no use where the logits are no numbers."""
        sampled = [Sampled(token, None) for token in self._chosen.tolist()]
        for i, logprobs in zip(self._reporting, self._report(), strict=True):
            sampled[i] = Sampled(logprobs.token_id, logprobs)
        return sampled


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A step that memory was too short for: parts, of rows cut from `rows`. Of `unfit` rows not one token has fit."""

    rows: list[Row]
    parts: list[LaunchedStep]
    unfit: set[Row]
    tokens = None
    """No step is launched before this one's tokens are known."""

    @property
    def done(self) -> bool:
        """Whether `collect` would return at once."""
        return all(part.done for part in self.parts)

    def collect(self) -> StepResult:
        """Wait until the step is over. The results are those of whole rows."""
        joined = StepResult(unfit=self.unfit)
        stopped: dict[Row, list[Stopped]] = {}
        for result in [part.collect() for part in self.parts]:
            joined.sampled.update((row.whole, sampled) for row, sampled in result.sampled.items())
            joined.broken.update(row.whole for row in result.broken)
            for row, scores in result.scores.items():
                joined.scores.setdefault(row.whole, []).extend(scores)
            for row, found in result.captured.items():
                joined.captured.setdefault(row.whole, []).extend(found)
            for row, part in result.stopped.items():
                stopped.setdefault(row.whole, []).append(part)
        for row, parts in stopped.items():
            bases = [part.base for part in parts if part.base is not None]
            joined.stopped[row] = Stopped(
                HostTensor.joined([part.hidden for part in parts]),
                HostTensor.joined(bases) if bases else None,
                parts[-1].states,
            )
        joined.captured = {row: _join_captures(row, found) for row, found in joined.captured.items()}
        return joined


def _join_captures(row: Row, captured: Sequence[Captured]) -> list[Captured]:
    """One for each `Record` of the row, in their order, from those of its cuts."""
    found: dict[tuple[str, int], list[Captured]] = {}
    for each in captured:
        found.setdefault((each.breakpoint, each.layer), []).append(each)
    records = (step for step in row.path.steps if isinstance(step, Record))
    wanted = ((record.breakpoint, record.layer) for record in records)
    return [each for key in wanted if key in found for each in _join(found[key])]


def _join(cuts: list[Captured]) -> list[Captured]:
    """One of all cuts. The patterns of each have other keys: they stay apart."""
    first = cuts[0]
    if any(cut.shape != first.shape for cut in cuts):
        return cuts
    return [
        replace(
            first,
            positions=tuple(position for cut in cuts for position in cut.positions),
            token_ids=tuple(token for cut in cuts for token in cut.token_ids),
            hidden=HostTensor.joined([cut.hidden for cut in cuts]),
            holds=HostTensor.joined([cut.holds for cut in cuts if cut.holds is not None]) if first.holds else None,
        )
    ]
