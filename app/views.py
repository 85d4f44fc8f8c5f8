"""What the server answers about sessions, turns and memory. Names carry their unit; token counts are plain integers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal, Self

from pydantic import BaseModel, Field

from app.domain import FinishReason, SessionState, TokenLogprobs, TurnUsage
from app.messages import MemoryMap, SessionMemory
from app.session import Session


def is_none(value: object) -> bool:
    """For fields that are left out of the answer when they have no value."""
    return value is None


class KVView(BaseModel):
    """Where a session's KV is. `tier` is null when it has none."""

    tier: Literal["device"] | None
    blocks: int
    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0


class ResumeTimes(BaseModel):
    """What the last turn's time to first token was made of, in milliseconds."""

    queue: float
    restore: float = 0.0
    prefill: float


class SessionUsageView(BaseModel):
    """Totals over a session's turns, in tokens and bytes."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_recomputed: int
    bytes_out: int = 0
    bytes_in: int = 0
    restores: int = 0
    resume_ms: ResumeTimes


class SessionView(BaseModel):
    """A session. Times are Unix seconds; `tokens` is the length of its history."""

    id: str
    state: SessionState
    phase: Literal["compute"] = "compute"
    tokens: int
    kv: KVView
    checkpoint: None = None
    usage: SessionUsageView
    metadata: dict[str, str]
    created_at: float
    expires_at: float | None

    @classmethod
    def of(cls, session: Session, memory: SessionMemory) -> Self:
        """The session as it is now, its KV as the engine found it."""
        usage = session.usage
        return cls(
            id=session.id,
            state=session.state,
            tokens=len(session.history),
            kv=KVView(
                tier="device" if memory.blocks else None,
                blocks=memory.blocks,
                device_bytes=memory.device_bytes,
            ),
            usage=SessionUsageView(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                tokens_recomputed=usage.tokens_recomputed,
                resume_ms=ResumeTimes(queue=usage.queue_ms, prefill=usage.prefill_ms),
            ),
            metadata=session.metadata,
            created_at=session.created_at,
            expires_at=session.expires_at,
        )


class SessionPage(BaseModel):
    """Sessions by age, oldest first. If there are more, ask again with `after` set to the last one's id."""

    data: list[SessionView]
    has_more: bool


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
    """A turn that is over, whole. `logprobs` is there if the request asked for it."""

    status: Literal["finished"] = "finished"
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: TurnUsageView
    checkpoint: None = None
    logprobs: list[TokenLogprobsView] | None = Field(None, exclude_if=is_none)


class TokenEvent(BaseModel):
    """Data of a `token` event. Text can lag behind the tokens while a character or a stop string is incomplete."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobsView] | None = Field(None, exclude_if=is_none)


class ErrorDetail(BaseModel):
    """What went wrong: `code` is for programs, `message` for people; `param` names the field at fault."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorBody(BaseModel):
    """The body of every error answer, and the data of an `error` event."""

    error: ErrorDetail


class Status(BaseModel):
    """That the server is up."""

    status: Literal["ok", "ready"]


class Version(BaseModel):
    """What runs here."""

    version: str
    model: str
    device: str
    dtype: str


class DataView(BaseModel):
    """The KV pool: what sessions hold (`owned`), and what only serves as a prefix (`cached`) and gives way."""

    total_bytes: int
    owned_bytes: int
    cached_bytes: int
    block_bytes: int
    block_tokens: int


class MemoryView(BaseModel):
    """The memory map: weights (`text`), KV (`data`), and who uses it. A session is resident while it holds KV."""

    text_bytes: int
    data: DataView
    sessions: int
    sessions_resident: int
    turns_running: int
    turns_waiting: int

    @classmethod
    def of(cls, memory: MemoryMap) -> Self:
        """The wire form of the engine's map."""
        return cls(
            text_bytes=memory.text_bytes,
            data=DataView(
                total_bytes=memory.kv_total_bytes,
                owned_bytes=memory.kv_owned_bytes,
                cached_bytes=memory.kv_cached_bytes,
                block_bytes=memory.block_bytes,
                block_tokens=memory.block_tokens,
            ),
            sessions=memory.sessions,
            sessions_resident=memory.sessions_resident,
            turns_running=memory.running,
            turns_waiting=memory.waiting,
        )


class MemoryEstimate(BaseModel):
    """What one session of `tokens` tokens takes, and how many of them the KV pool holds at once."""

    tokens: int
    blocks: int
    kv_bytes: int
    kv_bytes_per_token: int
    sessions_resident: int

    @classmethod
    def of(cls, memory: MemoryMap, tokens: int) -> Self:
        """Whole blocks, as the pool hands them out."""
        blocks = -(-tokens // memory.block_tokens)
        return cls(
            tokens=tokens,
            blocks=blocks,
            kv_bytes=blocks * memory.block_bytes,
            kv_bytes_per_token=memory.block_bytes // memory.block_tokens,
            sessions_resident=memory.kv_total_bytes // (blocks * memory.block_bytes),
        )
