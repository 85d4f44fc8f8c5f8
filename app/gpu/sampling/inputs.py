"""The requests of a step as arrays for the sampler, which go to the device with the step's other inputs.

Tokens are addressed as `row * vocab_size + token`, into the flattened logits of the rows that sample.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from torch import Tensor

from app.domain.values import SamplingParams
from app.gpu.device.staging import Put
from app.gpu.sampling.philox import uniforms
from app.gpu.sampling.requests import SampleRequest, draws


@dataclass(frozen=True, slots=True)
class Change:
    """One kind of change to logits: `[changes]` int64 tokens, each of them once, and `[changes]` float32 values."""

    tokens: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that draw their token: `[draws]` int64 rows, `[draws, 1]` float64 from 0 to 1, `[draws, 1]` float32."""

    rows: Tensor
    uniforms: Tensor
    temperatures: Tensor


@dataclass(frozen=True, slots=True)
class Truncation:
    """What draws are limited to, all `[draws, 1]`: `top_k` int64, the vocabulary's size where there is no limit, the
    rest float32.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def of(self, draws: Tensor) -> Self:
        """Those of some draws: `[some]` int64."""
        return type(self)(self.top_k[draws], self.top_p[draws], self.min_p[draws])


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The requests of a step. A field that no row asks for is None."""

    bias: Change | None
    forbidden: Change | None
    repetition: Change | None
    counts: Change | None
    free: Draws | None
    """Draws from the whole vocabulary."""
    truncated: tuple[Draws, Truncation] | None
    """Draws from what `top_k`, `top_p` and `min_p` leave."""


def place_requests(requests: Sequence[SampleRequest], vocab_size: int, put: Put) -> SamplingInputs:
    """Lay out the requests of the rows of logits, in their order. A row that asks for nothing costs next to nothing."""
    bias, forbidden, repetition, counts = _Changes(), _Changes(), _Changes(), _Changes()
    free, truncated = list[int](), list[int]()
    for row, request in enumerate(requests):
        params, first = request.params, row * vocab_size
        if params.logit_bias:
            bias.add(first, params.logit_bias)
        if request.forbidden:
            forbidden.add(first, dict.fromkeys(request.forbidden, -np.inf))
        if params.repetition_penalty != 1:
            repetition.add(first, dict.fromkeys(request.tokens, params.repetition_penalty))
        if params.presence_penalty or params.frequency_penalty:
            counts.add(first, _counts(request))
        if draws(params):
            (truncated if _truncates(params) else free).append(row)
    return SamplingInputs(
        bias.place(put),
        forbidden.place(put),
        repetition.place(put),
        counts.place(put),
        _place_draws(requests, free, put) if free else None,
        (_place_draws(requests, truncated, put), _place_limits(requests, truncated, vocab_size, put))
        if truncated
        else None,
    )


class _Changes:
    """Changes of one kind, row after row."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._values: list[float] = []

    def add(self, first: int, changes: Mapping[int, float]) -> None:
        """Those of a row whose logits begin at `first`."""
        self._tokens += [first + token for token in changes]
        self._values += changes.values()

    def place(self, put: Put) -> Change | None:
        if not self._tokens:
            return None
        return Change(put(np.array(self._tokens, np.int64)), put(np.array(self._values, np.float32)))


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _counts(request: SampleRequest) -> dict[int, float]:
    """What the presence and frequency penalties take off, for each token that has been generated."""
    params, generated = request.params, request.tokens[request.prompt_tokens :]
    return {token: params.presence_penalty + params.frequency_penalty * n for token, n in Counter(generated).items()}


def _place_draws(requests: Sequence[SampleRequest], rows: list[int], put: Put) -> Draws:
    chosen = [requests[row] for row in rows]
    numbers = uniforms([each.params.seed for each in chosen], [each.position for each in chosen])
    temperatures = np.array([each.params.temperature for each in chosen], np.float32)
    return Draws(put(np.array(rows, np.int64)), put(numbers[:, None]), put(temperatures[:, None]))


def _place_limits(requests: Sequence[SampleRequest], rows: list[int], vocab_size: int, put: Put) -> Truncation:
    params = [requests[row].params for row in rows]
    top_k = np.array([min(each.top_k or vocab_size, vocab_size) for each in params], np.int64)
    top_p = np.array([each.top_p for each in params], np.float32)
    min_p = np.array([each.min_p for each in params], np.float32)
    return Truncation(put(top_k[:, None]), put(top_p[:, None]), put(min_p[:, None]))
