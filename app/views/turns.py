"""What the server answers about a turn."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal, Self

from pydantic import BaseModel, Field

from app.domain import FinishReason, TokenLogprobs, TurnUsage
from app.views.checkpoint import CheckpointView


def is_none(value: object) -> bool:
    """For fields that are left out of the answer when they have no value."""
    return value is None


class AlternativeView(BaseModel):
    """A token that could stand at a position, with its natural-log probability."""

    token_id: int
    logprob: float


class TokenLogprobsView(AlternativeView):
    """The token that stands at a position, and the most likely ones there, best first."""

    top: list[AlternativeView]

    @classmethod
    def of(cls, found: TokenLogprobs) -> Self:
        """The wire form of `found`."""
        top = [AlternativeView(token_id=token_id, logprob=logprob) for token_id, logprob in found.top]
        return cls(token_id=found.token_id, logprob=found.logprob, top=top)


class TurnUsageView(BaseModel):
    """What a turn cost, in tokens; `prompt_tokens` is the whole context that it started from."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_recomputed: int

    @classmethod
    def of(cls, usage: TurnUsage) -> Self:
        """The wire form of `usage`."""
        return cls(**asdict(usage))


class TurnView(BaseModel):
    """A turn that is over, or the whole of one up to where it is paused: then it has a `checkpoint` and no
    `finish_reason`. `logprobs` is there if the request that began it asked for it.
    """

    status: Literal["finished", "paused"]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    usage: TurnUsageView
    checkpoint: CheckpointView | None
    logprobs: list[TokenLogprobsView] | None = Field(None, exclude_if=is_none)


class TokenEvent(BaseModel):
    """Data of a `token` event. Text can lag behind the tokens while a character or a stop string is incomplete."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobsView] | None = Field(None, exclude_if=is_none)
