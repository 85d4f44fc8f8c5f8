"""The requests of a step as arrays for the sampler, which go to the device with the step's other inputs.

Tokens are addressed as `row * vocab_size + token`, into the flattened logits of the rows that sample.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """Rows that draw their token; `[draws]` int64 rows, all else `[draws, 1]`.

    `uniforms` float64, from 0 to 1. `top_k` int64, the vocabulary's size where there is no limit. The rest float32.
    """

    rows: Tensor
    uniforms: Tensor
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The requests of a step. A field that no row asks for is None."""

    bias: Change | None
    forbidden: Change | None
    repetition: Change | None
    counts: Change | None
    free: Draws | None
    """Draws from the whole vocabulary."""
    truncated: Draws | None
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
        _place_draws(requests, free, vocab_size, put),
        _place_draws(requests, truncated, vocab_size, put),
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


def _place_draws(requests: Sequence[SampleRequest], rows: list[int], vocab_size: int, put: Put) -> Draws | None:
    if not rows:
        return None
    chosen = [requests[row] for row in rows]
    params = [request.params for request in chosen]

    def column(values: Sequence[float], dtype: type[np.generic]) -> Tensor:
        return put(np.array(values, dtype)[:, None])

    return Draws(
        put(np.array(rows, np.int64)),
        put(uniforms([each.seed for each in params], [request.position for request in chosen])[:, None]),
        column([each.temperature for each in params], np.float32),
        column([min(each.top_k or vocab_size, vocab_size) for each in params], np.int64),
        column([each.top_p for each in params], np.float32),
        column([each.min_p for each in params], np.float32),
    )
