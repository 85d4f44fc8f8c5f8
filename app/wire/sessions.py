"""Bodies about sessions, their history and their phase."""

from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from app.domain.points import Point
from app.domain.values import MAX_NAME, Phase, Residency, SessionState, Tier
from app.sessions.session import Session
from app.wire.base import MAX_COUNT, QueryModel, View, WireModel, shape
from app.wire.checkpoint import CheckpointView

DAY_MS = 24 * 3600 * 1000
MAX_TTL_S = 30 * 24 * 3600
"""A session whose client never comes back is closed some day."""

MAX_LABELS = 16
MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_LABELS)]
"""The client's own labels, kept and returned as they came: OpenAI's limits."""


class SessionLabels(WireModel):
    """What a client says of a session, and what goes with it from server to server."""

    metadata: Metadata = Field(default={})
    ttl_s: int | None = Field(
        None, ge=1, le=MAX_TTL_S, description="closes after this many seconds without a turn; default 30 days"
    )


class CreateSessionBody(SessionLabels):
    """A new session."""

    model: str | None = Field(
        None,
        max_length=MAX_NAME,
        description="a name of /v1/models: the base, or a LoRA adapter that the session is computed with for its life "
        "(default: the base)",
    )
    residency: Annotated[Residency, Field(strict=False)] = Field(
        Residency.BEST_EFFORT,
        description="guaranteed: never evicted for other sessions; refused where the reserve is used up",
    )


class UpdateSessionBody(WireModel):
    """Labels to change. Lists show the label `name` first."""

    metadata: dict[MetadataKey, MetadataValue | None] = Field(
        max_length=MAX_LABELS, description="labels to set; null takes one away, and the others stay"
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
        raise PydanticCustomError("enum", "the schema lists what may be given")
    return state


ListedState = Annotated[
    SessionState, BeforeValidator(_require_listed), WithJsonSchema({"type": "string", "enum": list(LISTED)})
]


class ListSessionsQuery(QueryModel):
    """Which sessions to list."""

    limit: int = Field(20, ge=1, le=100)
    after: str | None = Field(None, description="id of the last session of the page before")
    state: ListedState | None = None
    tier: Tier | None = Field(None, description="only sessions whose KV is there")
    name: str | None = Field(
        None, min_length=1, max_length=MAX_NAME, description="only the caller's session that X-Session-ID calls so"
    )


class KVView(View):
    """Where a session's KV is. `tier` is null when it has none."""

    tier: Tier | None
    blocks: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int


class ResumeTimes(View):
    """What the last turn's time to first token was made of, in milliseconds.

    `restore` is the wait for KV on its way back to the device, `queue` any other wait.
    """

    queue: float = Field(validation_alias="queue_ms")
    restore: float = Field(validation_alias="restore_ms")
    prefill: float = Field(validation_alias="prefill_ms")


class LastTurn(View):
    """What the last turn cost, in tokens: of its context `[0, prompt_tokens)` the first `cached_tokens` had their KV.

    `tokens_recomputed` of the rest had lost it. Then it generated `completion_tokens`.
    """

    prompt_tokens: int
    cached_tokens: int
    tokens_recomputed: int
    completion_tokens: int


class SessionUsageView(BaseModel):
    """Totals over a session's turns in tokens, and the bytes of KV that left the device and came back."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_recomputed: int
    bytes_out: int
    bytes_in: int
    restores: int
    resume_ms: ResumeTimes
    last_turn: LastTurn | None = Field(description="null before the first turn has ended")

    @classmethod
    def of(cls, session: Session) -> Self:
        """What the session has cost so far."""
        usage, memory = session.usage, session.kv
        tokens = ("prompt_tokens", "cached_tokens", "completion_tokens", "tokens_recomputed")
        return cls(
            **{name: getattr(usage, name) for name in tokens},
            **{name: getattr(memory, name) for name in ("bytes_out", "bytes_in", "restores")},
            resume_ms=usage,
            last_turn=usage.last,
        )


class ForkView(View):
    """Which session this one was forked from, and how many tokens that had then. It may be closed by now."""

    session_id: str = Field(validation_alias="session")
    tokens: int


class InterruptedTurn(View):
    """A turn that paused `at` that time, in Unix seconds, and that the server's end has ended. So many tokens of the
    history were lost with it.
    """

    at: float
    layer: int
    point: Point
    tokens_lost: int


TIMES = ("created_at", "used_at", "returns_at", "expires_at")
AS_THEY_ARE = ("id", "state", "phase", "residency", "kv", "forked_from", "metadata", *TIMES)
"""Fields that a session has under the same names."""


class SessionView(BaseModel):
    """A session. Times are Unix seconds; `tokens` is the length of its history. A paused one has a `checkpoint`, and
    `breakpoints` are the ids of those that are armed.

    `used_at` is when a turn last began, paused or ended, or items came to its conversation. `tenant` is whose it is:
    null on a server without keys. `adapter` is the LoRA adapter that it is computed with: null for the base alone.
    `metadata` is for its tenant: operators see none of others.
    """

    id: str
    tenant: str | None
    state: SessionState
    phase: Phase
    residency: Residency
    adapter: str | None
    tokens: int
    kv: KVView
    checkpoint: CheckpointView | None
    interrupted_turn: InterruptedTurn | None = Field(description="null once the next turn has begun")
    breakpoints: list[str]
    usage: SessionUsageView
    forked_from: ForkView | None
    metadata: dict[str, str]
    created_at: float
    used_at: float
    returns_at: float | None
    expires_at: float | None

    @classmethod
    def of(cls, session: Session) -> Self:
        """The session as it is now."""
        return cls(
            **{name: getattr(session, name) for name in AS_THEY_ARE},
            tenant=session.owner,
            adapter=session.adapter and session.adapter.name,
            tokens=len(session.history),
            checkpoint=session.pause and CheckpointView.of(session.pause.info, session.pause.expires_at),
            interrupted_turn=session.usage.interrupted,
            breakpoints=list(session.breakpoints),
            usage=SessionUsageView.of(session),
        )

    def seen_by(self, reader: str | None) -> Self:
        """What that tenant may see of it: no other tenant reads a client's text."""
        return self if self.tenant == reader else self.model_copy(update={"metadata": {}})


SessionPage = shape(
    "SessionPage",
    "Sessions by age, oldest first. If there are more, call again with `after` set to the last one's id.",
    {"data": [SessionView], "has_more": bool},
)


class MovingView(BaseModel):
    """KV on its way: where to, and how much."""

    to: Tier
    bytes: int


class PhaseView(BaseModel):
    """The session's phase, where its KV is, and what the signal sets going (null: nothing).

    The answer does not wait for the engine, which may still find that a move is not worth its time or has no room.
    """

    phase: Phase
    tier: Tier | None
    moving: MovingView | None

    @classmethod
    def of(cls, session: Session, *, leaves: bool) -> Self:
        """What the session's phase asks for, given where its KV is, if signals move it and the host can hold it."""
        kv, moving = session.kv, None
        if leaves and kv.tier is not None:
            if session.phase in (Phase.IO_WAIT, Phase.IDLE) and 0 < kv.device_bytes <= kv.host_room:
                moving = MovingView(to=Tier.HOST, bytes=kv.device_bytes - min(kv.host_bytes, kv.device_bytes))
            elif session.phase in (Phase.READY, Phase.COMPUTE) and not kv.device_bytes:
                moving = MovingView(to=Tier.DEVICE, bytes=kv.host_bytes or kv.disk_bytes)
        return cls(phase=session.phase, tier=kv.tier, moving=moving)


class HistoryQuery(QueryModel):
    """How much to tell of a history."""

    start: int = Field(0, ge=0, le=MAX_COUNT, description="position of the first token to tell")
    pieces: bool = Field(False, description="also the text of each token")


class HistoryView(BaseModel):
    """The tokens of a session from `start` on, its prompts and what was generated: `tokens` counts all of them. `text`
    shows special tokens too.

    `pieces`, null unless asked for, are parts of `text`: `pieces[i]` is what `token_ids[i]` completes. One that only
    begins a character completes nothing.
    """

    tokens: int
    token_ids: list[int]
    text: str
    pieces: list[str] | None
