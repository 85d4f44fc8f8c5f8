"""From logits to tokens and log-probabilities. Here: requests and answers. No torch, so that planning can use both."""

from msgspec import Struct

from app.domain.values import SamplingParams, TokenLogprobs
from app.gpu.state.sequence import Seen
from app.grammars.matcher import Matcher

GREEDY_BELOW = 1e-5
"""A token is drawn from this temperature on. Under it the most likely one is taken: dividing by it would overflow."""


class SampleRequest(Struct):  # hundreds are made a step: a dataclass takes three times as long
    """One row's wish: its parameters, tokens not allowed yet, and the position of the new token."""

    params: SamplingParams
    forbidden: frozenset[int]
    position: int
    matcher: Matcher | None = None
    """Tells which tokens the grammar allows."""
    seen: Seen | None = None
    """The tokens before the new one, if the parameters `penalise` some."""


class Sampled(Struct, frozen=True):
    """The chosen token, with its log-probabilities if the row asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


def penalise(params: SamplingParams) -> bool:
    """Whether the logits of tokens change with how often they were seen."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
