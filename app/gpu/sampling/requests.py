"""Requests to the sampler, and its answers. No torch, so that planning can use both."""

from dataclasses import dataclass
from typing import NamedTuple

from app.domain.values import SamplingParams, TokenLogprobs
from app.gpu.state.sequence import Seen
from app.grammars.matcher import Matcher

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow float32."""


@dataclass(slots=True)  # not frozen: hundreds are made a step, and that would take twice as long
class SampleRequest:
    """One row's wish: its parameters, tokens not allowed yet, and the position of the new token."""

    params: SamplingParams
    forbidden: frozenset[int]
    position: int
    matcher: Matcher | None = None
    """Tells which tokens the grammar allows."""
    seen: Seen | None = None
    """The tokens before the new one, if the parameters `penalise` some."""


def draws(params: SamplingParams) -> bool:
    """Whether a token is drawn, rather than the most likely one."""
    return params.temperature >= GREEDY_BELOW


def penalise(params: SamplingParams) -> bool:
    """Whether the logits of tokens change with how often they were seen."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def looks_back(params: SamplingParams) -> bool:
    """Whether a token depends on those before it other than through the logits."""
    return params.grammar is not None or penalise(params)


class Sampled(NamedTuple):
    """The chosen token, with its log-probabilities if the row asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None
