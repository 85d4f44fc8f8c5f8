"""What the server answers about a paused pass."""

from __future__ import annotations

import time
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from app.activations import CheckpointInfo, LensPosition
from app.breakpoints import Pass
from app.tokens import Tokens


class CheckpointView(BaseModel):
    """A pass over positions `[first, end)` of the history that has stopped after `layer`.

    It holds a residual stream of `shape` `[end - first, hidden_size]` in `dtype`. `breakpoint` is null where `until`
    stopped it; `saved_ms` is how long it took to leave the batch. Times are Unix seconds; `age_s` is counted from
    `created_at` to the answer.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    layer: int
    first: int
    end: int
    shape: tuple[int, int]
    hidden_size: int
    dtype: str
    bytes: int
    in_pass: Pass = Field(serialization_alias="pass")
    breakpoint: str | None
    saved_ms: float
    created_at: float
    age_s: float
    expires_at: float | None = Field(description="null if the pause was over when this was written")

    @classmethod
    def of(cls, info: CheckpointInfo, expires_at: float | None) -> Self:
        """The wire form of `info`."""
        return cls(
            layer=info.layer,
            first=info.first,
            end=info.end,
            shape=(info.end - info.first, info.hidden_size),
            hidden_size=info.hidden_size,
            dtype=info.dtype,
            bytes=info.bytes,
            in_pass=info.in_pass,
            breakpoint=info.breakpoint,
            saved_ms=info.saved_ms,
            created_at=info.created_at,
            age_s=max(0.0, time.time() - info.created_at),
            expires_at=expires_at,
        )


class ActivationView(BaseModel):
    """The residual stream after `layer` at positions `[first, end)`: one row of `hidden_size` numbers for each."""

    layer: int
    first: int
    end: int
    dtype: str
    values: list[list[float | None]] = Field(description="null where the model's own number is not finite")


class LensTokenView(BaseModel):
    """A token that could come next, with its natural-log probability."""

    token_id: int
    text: str
    logprob: float | None = Field(description="null where the residual stream is not finite")


class LensPositionView(BaseModel):
    """What the model would say at a position where `token_id` stands, best first."""

    position: int
    token_id: int
    text: str
    top: list[LensTokenView]

    @classmethod
    def of(cls, found: LensPosition, tokens: Tokens) -> Self:
        """The wire form of `found`."""
        top = [
            LensTokenView(token_id=token_id, text=tokens.token_text(token_id), logprob=logprob)
            for token_id, logprob in found.top
        ]
        return cls(position=found.position, token_id=found.token_id, text=tokens.token_text(found.token_id), top=top)


class LensView(BaseModel):
    """The logit lens: the final norm and the head, applied to what is there after `layer`."""

    layer: int
    positions: list[LensPositionView]
