"""What a client may ask of a session."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

from app.domain import Phase, Residency, SessionState, Tier
from app.schemas.wire import MAX_COUNT, WireModel

DAY_MS = 24 * 3600 * 1000

MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]
"""The client's own labels, kept and returned as they came: OpenAI's limits."""


class SessionLabels(WireModel):
    """What a client says of a session, and what goes with it from server to server."""

    metadata: Metadata = Field(default={})
    ttl_s: int | None = Field(
        None, ge=1, le=30 * 24 * 3600, description="closes after this many seconds without a turn"
    )


class CreateSessionBody(SessionLabels):
    """A new session."""

    residency: Annotated[Residency, Field(strict=False)] = Field(
        Residency.BEST_EFFORT,
        description="guaranteed: its KV never gives way to other sessions; refused where the reserve is used up",
    )


class RewindBody(WireModel):
    """Where to cut the history."""

    to_token: int = Field(ge=0, le=MAX_COUNT, description="position of the first token to drop")


class PhaseBody(WireModel):
    """What the session is doing from now on."""

    phase: Annotated[Phase, Field(strict=False)]
    resume_in_ms: float | None = Field(
        None, ge=0, le=DAY_MS, description="when the session will go on, from now; only with io_wait and idle"
    )

    @field_validator("resume_in_ms")
    @classmethod
    def _only_of_one_who_is_away(cls, value: float | None, info: ValidationInfo) -> float | None:
        phase = info.data.get("phase")
        if value is not None and phase in (Phase.COMPUTE, Phase.READY):
            raise ValueError(f"goes with phase io_wait or idle, not with {phase}")
        return value


LISTED = tuple(state for state in SessionState if state is not SessionState.CLOSED)


def _require_listed(state: object) -> object:
    if state not in LISTED:
        raise ValueError(f"Input should be {', '.join(LISTED[:-1])} or {LISTED[-1]}")
    return state


ListedState = Annotated[
    SessionState, BeforeValidator(_require_listed), WithJsonSchema({"type": "string", "enum": list(LISTED)})
]


class ListSessionsQuery(WireModel):
    """Which sessions to list."""

    model_config = ConfigDict(strict=False)

    limit: int = Field(20, ge=1, le=100)
    after: str = Field("", description="id of the last session of the page before")
    state: ListedState | None = None
    tier: Tier | None = Field(None, description="only sessions whose KV is there")
