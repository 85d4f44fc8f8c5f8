"""From logits to tokens.

Order of the steps, as the OpenAI and vLLM servers have it: log-probabilities are reported of the raw logits; then
bias, the minimum length, and penalties change them; then temperature, `top_k`, `top_p` and `min_p`, each on what the
one before left, as Transformers chains its warpers; then one draw.

The draw is a counter-based random number, Philox keyed by the request's seed at the position of the new token
(Salmon et al., 2011): there is no generator state to keep, so a session that is rewound, forked, preempted or moved
draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from app.domain import SamplingParams, TokenLogprobs
from app.gpu.sampling import Sampled, SampleRequest

CANDIDATES = 1024
"""Tokens that are sorted first; nearly always enough to reach `top_p`, and 40 times cheaper than sorting a
vocabulary.
"""


GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow float32."""


def sample(logits: Tensor, requests: Seq[SampleRequest]) -> list[Sampled]:
    """Choose one token per row. `logits` is float32 `[len(requests), vocab_size]`; it is changed in place."""
    reported = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
    raw = torch.log_softmax(logits[reported], dim=-1) if reported else None
    for row, request in zip(logits, requests, strict=True):
        _adjust(row, request)
    chosen = _argmax(logits)
    for i, request in enumerate(requests):
        if request.params.temperature >= GREEDY_BELOW:
            chosen[i] = _draw(logits[i], request.params, position=len(request.tokens))
    result = [Sampled(token, None) for token in chosen]
    for i, row in zip(reported, raw if raw is not None else (), strict=True):
        result[i] = Sampled(chosen[i], token_logprobs(row, chosen[i], requests[i].params.logprobs or 0))
    return result


def _argmax(logits: Tensor) -> list[int]:
    """Largest logit of each row. On CPU through NumPy, which takes a tenth of PyTorch's time for it."""
    found = logits.argmax(dim=-1) if logits.is_cuda else logits.numpy().argmax(axis=-1)
    chosen: list[int] = found.tolist()
    return chosen


def token_logprobs(log_probabilities: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """Report one position: `log_probabilities` is `[vocab_size]`, `top` the number of alternatives."""
    values, ids = log_probabilities.topk(top)
    alternatives = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(log_probabilities[token_id]), alternatives)


def score_prompt(logits: Tensor, token_ids: Seq[int], top: int) -> list[TokenLogprobs]:
    """Report prompt tokens: row i of `logits` `[len(token_ids), vocab_size]` predicts `token_ids[i]`."""
    raw = torch.log_softmax(logits, dim=-1)
    return [token_logprobs(row, token, top) for row, token in zip(raw, token_ids, strict=True)]


def _adjust(row: Tensor, request: SampleRequest) -> None:
    """Apply bias, minimum length and penalties to one row of logits, in place."""
    params = request.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), device=row.device)
    if request.forbidden:
        row[list(request.forbidden)] = -torch.inf
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(request.tokens)), device=row.device)
        value = row[seen]
        row[seen] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    generated = request.tokens[request.prompt_tokens :]
    if generated and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.tensor(generated, device=row.device).unique(return_counts=True)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts


def _draw(row: Tensor, params: SamplingParams, position: int) -> int:
    """Draw one token from one adjusted row of logits by inverting the cumulative distribution."""
    probabilities = torch.softmax(row / params.temperature, dim=-1)
    uniform = np.random.Generator(np.random.Philox(key=params.seed, counter=position)).random()
    if params.top_k or params.top_p < 1 or params.min_p:
        values, ids = _candidates(probabilities, params)
    else:
        values, ids = probabilities, None
    cumulative = values.double().cumsum(dim=-1)
    index = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    index = min(index, len(values) - 1)
    return index if ids is None else int(ids[index])


def _candidates(probabilities: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Tokens that `top_k`, `top_p` and `min_p` leave, most probable first: `(values, ids)`, never empty."""
    vocab_size = len(probabilities)
    if 0 < params.top_k < vocab_size:
        values, ids = probabilities.topk(params.top_k)
        values = values / values.sum()
    else:
        values, ids = probabilities.topk(min(vocab_size, CANDIDATES))
        if len(values) < vocab_size and not _suffices(values, params):
            values, ids = probabilities.sort(descending=True)
    mass_before = values.cumsum(dim=-1) - values
    keep = (mass_before < params.top_p) & (values >= params.min_p * values[0])
    keep[0] = True
    return values[keep], ids[keep]


def _suffices(values: Tensor, params: SamplingParams) -> bool:
    """Whether no token past the sorted ones could pass `top_p` and `min_p`."""
    reached_top_p = params.top_p < 1 and float(values.sum()) >= params.top_p
    return reached_top_p or float(values[-1]) < params.min_p * float(values[0])
