"""The requests of a step as arrays for the sampler, which go to the device with the step's other inputs.

Tokens are addressed as `row * vocab_size + token`, into the flattened logits of the rows that sample.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from app.gpu.device.staging import Put
from app.gpu.sampling.philox import uniform
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
    """Lay out the requests of the rows of logits, in their order."""
    drawing = [i for i, request in enumerate(requests) if draws(request.params)]
    truncates = [p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in (request.params for request in requests)]

    def place(changes: Iterable[Mapping[int, float]]) -> Change | None:
        return _place_changes(list(changes), vocab_size, put)

    return SamplingInputs(
        bias=place(request.params.logit_bias for request in requests),
        forbidden=place(dict.fromkeys(request.forbidden, -np.inf) for request in requests),
        repetition=place(_repetitions(request) for request in requests),
        counts=place(_counts(request) for request in requests),
        free=_place_draws(requests, [i for i in drawing if not truncates[i]], vocab_size, put),
        truncated=_place_draws(requests, [i for i in drawing if truncates[i]], vocab_size, put),
    )


def _repetitions(request: SampleRequest) -> dict[int, float]:
    penalty = request.params.repetition_penalty
    return {} if penalty == 1.0 else dict.fromkeys(request.tokens, penalty)


def _counts(request: SampleRequest) -> dict[int, float]:
    """What the presence and frequency penalties take off, for each token that has been generated."""
    params = request.params
    generated = request.tokens[request.prompt_tokens :]
    if not generated or not (params.presence_penalty or params.frequency_penalty):
        return {}
    return {token: params.presence_penalty + params.frequency_penalty * n for token, n in Counter(generated).items()}


def _place_changes(rows: Sequence[Mapping[int, float]], vocab_size: int, put: Put) -> Change | None:
    tokens = [row * vocab_size + token for row, changes in enumerate(rows) for token in changes]
    if not tokens:
        return None
    values = [value for changes in rows for value in changes.values()]
    return Change(put(np.array(tokens, np.int64)), put(np.array(values, np.float32)))


def _place_draws(requests: Sequence[SampleRequest], rows: list[int], vocab_size: int, put: Put) -> Draws | None:
    if not rows:
        return None
    chosen = [requests[row] for row in rows]

    def column(values: Iterable[float], dtype: type[np.generic]) -> Tensor:
        return put(np.array(list(values), dtype)[:, None])

    return Draws(
        put(np.array(rows, np.int64)),
        column((uniform(request.params.seed, request.position) for request in chosen), np.float64),
        column((request.params.temperature for request in chosen), np.float32),
        column((min(request.params.top_k or vocab_size, vocab_size) for request in chosen), np.int64),
        column((request.params.top_p for request in chosen), np.float32),
        column((request.params.min_p for request in chosen), np.float32),
    )
