"""What the server answers about a session."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel

from app.domain import KVPolicy, Phase, Residency, SessionState, Tier
from app.memory_map import SessionMemory
from app.session import Session
from app.views.checkpoint import CheckpointView


class KVView(BaseModel):
    """Where a session's KV is. `tier` is null when it has none."""

    tier: Tier | None
    blocks: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, memory: SessionMemory) -> Self:
        """The wire form of what the engine found."""
        return cls(
            tier=memory.tier,
            blocks=memory.blocks,
            device_bytes=memory.device_bytes,
            host_bytes=memory.host_bytes,
            disk_bytes=memory.disk_bytes,
        )


class ResumeTimes(BaseModel):
    """What the last turn's time to first token was made of, in milliseconds.

    `restore` is the wait for KV on its way back to the device, `queue` any other wait.
    """

    queue: float
    restore: float
    prefill: float


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

    @classmethod
    def of(cls, session: Session) -> Self:
        """What the session has cost so far."""
        usage, memory = session.usage, session.kv
        return cls(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            tokens_recomputed=usage.tokens_recomputed,
            bytes_out=memory.bytes_out,
            bytes_in=memory.bytes_in,
            restores=memory.restores,
            resume_ms=ResumeTimes(queue=usage.queue_ms, restore=usage.restore_ms, prefill=usage.prefill_ms),
        )


class SessionView(BaseModel):
    """A session. Times are Unix seconds; `tokens` is the length of its history. A paused one has a `checkpoint`."""

    id: str
    state: SessionState
    phase: Phase
    residency: Residency
    tokens: int
    kv: KVView
    checkpoint: CheckpointView | None
    usage: SessionUsageView
    metadata: dict[str, str]
    created_at: float
    expires_at: float | None

    @classmethod
    def of(cls, session: Session) -> Self:
        """The session as it is now."""
        return cls(
            id=session.id,
            state=session.state,
            phase=session.phase,
            residency=session.residency,
            tokens=len(session.history),
            kv=KVView.of(session.kv),
            checkpoint=session.pause and CheckpointView.of(session.pause.info, session.pause.expires_at),
            usage=SessionUsageView.of(session),
            metadata=session.metadata,
            created_at=session.created_at,
            expires_at=session.expires_at,
        )


class SessionPage(BaseModel):
    """Sessions by age, oldest first. If there are more, ask again with `after` set to the last one's id."""

    data: list[SessionView]
    has_more: bool


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
    def of(cls, session: Session, policy: KVPolicy) -> Self:
        """What the session's phase asks for, given where its KV is."""
        kv, moving = session.kv, None
        if policy is KVPolicy.SIGNAL and kv.tier is not None:
            if session.phase in (Phase.IO_WAIT, Phase.IDLE) and kv.device_bytes:
                moving = MovingView(to=Tier.HOST, bytes=kv.device_bytes - min(kv.host_bytes, kv.device_bytes))
            elif session.phase in (Phase.READY, Phase.COMPUTE) and not kv.device_bytes:
                moving = MovingView(to=Tier.DEVICE, bytes=kv.host_bytes or kv.disk_bytes)
        return cls(phase=session.phase, tier=kv.tier, moving=moving)
