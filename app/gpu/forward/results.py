"""Results of a step's logits: next tokens, prompt scores, and whether edits have left them finite.

They are computed on the device of the logits, and read on the host when the step is over.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from app.domain.values import TokenLogprobs
from app.gpu.device.staging import Download, Put
from app.gpu.device.streams import PASSED, DeviceStreams, Event
from app.gpu.forward.activations import HostTensor
from app.gpu.sampling.inputs import place_requests
from app.gpu.sampling.logprobs import Report, log_probabilities
from app.gpu.sampling.masks import Mask, MaskThread
from app.gpu.sampling.requests import Sampled, SampleRequest
from app.gpu.sampling.sampler import choose
from app.gpu.state.checkpoints import Captured
from app.gpu.state.segments import Row


@dataclass(slots=True)
class StepResult:
    """Results of a step's rows. A row whose logits are not finite is `broken`, whatever else it has."""

    sampled: dict[Row, list[Sampled]] = field(default_factory=dict)
    """Each row's next token, and those that were chosen after its drafted tokens."""
    scores: dict[Row, list[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities of the prompt tokens that follow each of the row's tokens."""
    stopped: dict[Row, HostTensor] = field(default_factory=dict)
    """The residual stream of each row that pauses, where it stopped."""
    captured: dict[Row, list[Captured]] = field(default_factory=dict)
    """Captures of breakpoints, lowest boundary first."""
    broken: set[Row] = field(default_factory=set)
    unfit: set[Row] = field(default_factory=set)
    """Rows that memory was too short for, one token at a time."""


class Sampling:
    """The next tokens of the rows that sample; `index` says where in the logits theirs are, None: they are all."""

    def __init__(
        self,
        requests: Sequence[SampleRequest],
        index: Sequence[int] | None,
        vocab_size: int,
        put: Put,
        mask: Mask | None = None,
    ) -> None:
        self._requests = requests
        self._index = None if index is None else put(np.array(index, np.int64))
        self._inputs = place_requests(requests, vocab_size, put)
        self._mask = mask
        self._reporting = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
        self._reported = put(np.array(self._reporting, np.int64))
        self.chosen: Tensor | None = None
        """One token per request, `[requests]` int64 where the logits are, once that has been launched."""

    def launch(self, logits: Tensor, download: Download, *, on_host: bool) -> None:
        """Choose, of all logits of the step; they are changed in place. Not to be called without requests. Waits for
        the masks of grammars.
        """
        wanted = logits if self._index is None else logits[self._index]
        raw = log_probabilities(wanted[self._reported]) if self._reporting else None
        if self._mask is not None:
            self._mask.apply(wanted)
        self.chosen = choose(wanted, self._inputs, on_host=on_host)
        self._tokens = download.fetch(self.chosen)
        tops = [self._requests[i].params.logprobs or 0 for i in self._reporting]
        self._report = None if raw is None else Report(raw, self.chosen[self._reported], tops, download)

    def abandon(self) -> None:
        """The step will not run: give its grammars' matchers back."""
        if self._mask is not None:
            self._mask.abandon()

    def read(self) -> list[Sampled]:
        """One token per request."""
        sampled = [Sampled(token, None) for token in self._tokens.tolist()]
        for i, logprobs in zip(self._reporting, () if self._report is None else self._report.read(), strict=True):
            sampled[i] = Sampled(logprobs.token_id, logprobs)
        return sampled


class PendingResult:
    """The result of a step that still runs. Made before the step is launched: `put` takes to the device what `launch`
    needs there.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        requests: Sequence[SampleRequest],
        vocab_size: int,
        streams: DeviceStreams,
        put: Put,
        masks: MaskThread,
    ) -> None:
        self._rows, self._requests, self._streams = rows, requests, streams
        self._done: Event = PASSED
        scoring = [row for row in rows if row.scores_prompt]
        self._edited = [row for row in rows if (row.path.new_edits or row.sequence.interventions) and row.outputs]
        self._spans = _spans(rows) if scoring or self._edited else {}
        index = [at for row in rows for at in _choosing(self._spans[row], row)] if scoring else None
        mask = masks.begin(requests, vocab_size, streams, put)
        self._sampling = Sampling(requests, index, vocab_size, put, mask)
        self._next_tokens = {row: put(np.array(_next_tokens(row), np.int64)) for row in scoring}
        self._scores: dict[Row, Report | None] = {}

    def abandon(self) -> None:
        """The step will not run."""
        self._sampling.abandon()

    def launch(self, logits: Tensor) -> None:
        """Launch the work on the step's logits, `[outputs, vocab_size]`; they are changed in place."""
        download = Download(self._streams)
        if self._edited:
            first, end = self._spans[self._edited[0]].start, self._spans[self._edited[-1]].stop
            largest = torch.linalg.vector_norm(logits[first:end], ord=math.inf, dim=-1)  # NaN, if one is that
            self._largest = download.fetch(largest), first
        for row, next_tokens in self._next_tokens.items():
            self._scores[row] = _score(row, logits[self._spans[row]], next_tokens, download)
        if self._requests:
            self._sampling.launch(logits, download, on_host=self._streams.on_host)
        if self._edited or self._next_tokens or self._requests:
            self._done = download.finish()

    @property
    def done(self) -> bool:
        """Whether `read` would return at once. True from the beginning for a step without outputs."""
        return self._done.query()

    @property
    def tokens(self) -> Tensor | None:
        """The chosen tokens, `[requests]` int64, for what is launched from now on; None if there are none."""
        return self._sampling.chosen

    def _broken(self) -> Iterator[Row]:
        """The edited rows that have a logit that is not finite."""
        largest, first = self._largest
        finite = largest.isfinite().numpy()
        for row in self._edited:
            span = self._spans[row]
            if not finite[span.start - first : span.stop - first].all():
                yield row

    def read(self) -> StepResult:
        """Wait until the step is over."""
        self._done.synchronize()
        result = StepResult()
        if self._edited:
            result.broken.update(self._broken())
        result.scores.update((row, [] if report is None else report.read()) for row, report in self._scores.items())
        if self._requests:
            sampled, end = self._sampling.read(), 0
            for row in self._rows:
                if row.samples:
                    begin, end = end, end + 1 + len(row.draft)
                    result.sampled[row] = sampled[begin:end]
        return result


def _spans(rows: Sequence[Row]) -> dict[Row, slice]:
    """Where in the step's logits each row's are."""
    ends = np.cumsum([row.outputs for row in rows]).tolist()
    return {row: slice(end - row.outputs, end) for row, end in zip(rows, ends, strict=True)}


def _choosing(span: slice, row: Row) -> range:
    """Those of a row's logits that choose a token."""
    return range(span.stop - row.choices, span.stop)


def _next_tokens(row: Row) -> list[int]:
    """The tokens that follow each of the row's in its history; the last of the history has none."""
    return row.sequence.tokens[row.first + 1 : row.first + row.length + 1]


def _score(row: Row, logits: Tensor, next_tokens: Tensor, download: Download) -> Report | None:
    count = len(next_tokens)
    if not count:
        return None
    tops = [row.turn.sampling.prompt_logprobs or 0] * count
    return Report(log_probabilities(logits[:count]), next_tokens, tops, download)
