"""Requests to the sampler, and its answers. No torch, so that planning can use both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.domain.values import SamplingParams, TokenLogprobs
from app.grammars.matcher import Matcher

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow float32."""


@dataclass(slots=True)  # not frozen: hundreds are made a step, and that would take twice as long
class SampleRequest:
    """One row's wish: its parameters, its history, where the generated part begins, and tokens not allowed yet.

    `position` is that of the new token. The history may not reach up to it if nothing `looks_back`.
    """

    params: SamplingParams
    tokens: Sequence[int]
    prompt_tokens: int
    forbidden: frozenset[int]
    position: int
    matcher: Matcher | None = None
    """Tells which tokens the grammar allows."""


def draws(params: SamplingParams) -> bool:
    """Whether a token is drawn, rather than the most likely one."""
    return params.temperature >= GREEDY_BELOW


def looks_back(params: SamplingParams) -> bool:
    """Whether a token depends on those before it other than through the logits."""
    penalises = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    return params.grammar is not None or bool(penalises)


class Sampled(NamedTuple):
    """The chosen token, with its log-probabilities if the row asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None
