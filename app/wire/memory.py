"""Bodies about memory, and the estimate for a session of a given length."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Literal, Self

from pydantic import BaseModel, Field

from app.domain.memory_map import MemoryMap
from app.domain.values import KVPolicy, SessionState, Tier
from app.sessions.capacity import LimitName
from app.sessions.session import Session
from app.wire.base import QueryModel, View, WireModel

Direction = Literal["out", "in", "to_disk", "from_disk"]
"""Which way KV moves: between device and host, or between host and disk."""


class TierView(View):
    """KV in one tier: what there is room for, what sessions hold, and what is only kept for reuse and gives way."""

    total_bytes: int
    owned_bytes: int
    cached_bytes: int

    def held(self, owned_bytes: int) -> Self:
        """The tier as those see it who hold so much of it."""
        return self.model_copy(update={"owned_bytes": owned_bytes, "cached_bytes": 0})


class DataView(View):
    """KV in every tier, in blocks of `block_tokens` tokens that take `block_bytes`."""

    device: TierView
    host: TierView
    disk: TierView
    block_bytes: int
    block_tokens: int

    @classmethod
    def of(cls, memory: MemoryMap) -> Self:
        """The part of the engine's map that is KV."""
        tiers = {"device": memory.device, "host": memory.host, "disk": memory.disk}
        size = memory.block_bytes * memory.blocks.in_a_row
        return cls.model_validate({**tiers, "block_bytes": size, "block_tokens": memory.blocks.tokens})


class MovesView(View):
    """What has moved one way since the start. `bytes_per_s` is measured over the copies: null before the first."""

    count: int = Field(validation_alias="moves")
    bytes: int
    seconds: float
    bytes_per_s: float | None


class CountsView(View):
    """What happened to KV since the start.

    `write_behind_bytes` left early, without anyone waiting; `turned_round` moves were overtaken by a new signal;
    `dropped` sessions lost KV for want of room and `disk_failures` files could not be written or read, which costs a
    recompute; `late_restores` turns found their KV not yet on the device.
    """

    write_behind_bytes: int
    turned_round: int
    dropped: int
    disk_failures: int
    late_restores: int


class StackView(View):
    """Residual streams in host memory: those of `checkpoints` paused turns, and captures."""

    checkpoints: int
    checkpoint_bytes: int
    capture_bytes: int


class TextView(View):
    """Weights, `total_bytes` of them. The device has `kept_bytes` that stay and `ring_bytes` through which the others
    are streamed, `streamed_bytes` since the start; on a device that keeps all there is no ring.
    """

    total_bytes: int
    kept_bytes: int
    ring_bytes: int
    streamed_bytes: int


class AdaptersView(View):
    """LoRA adapters that are loaded: their number, the bytes that they take on the device, and most that they may."""

    count: int
    bytes: int
    limit_bytes: int


class TenantUseView(BaseModel):
    """What one tenant has. KV that sessions share counts for each of them."""

    sessions: int
    turns_running: int
    turns_waiting: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, sessions: Collection[Session]) -> Self:
        """That of the sessions' owner."""
        states, held = Counter(session.state for session in sessions), [session.kv for session in sessions]
        return cls(
            sessions=len(sessions),
            turns_running=states[SessionState.RUNNING],
            turns_waiting=states[SessionState.QUEUED],
            device_bytes=sum(kv.device_bytes for kv in held),
            host_bytes=sum(kv.host_bytes for kv in held),
            disk_bytes=sum(kv.disk_bytes for kv in held),
        )


class MemoryView(BaseModel):
    """The memory map: weights (`text`) and adapters to them, KV (`data`) and what paused turns and captures keep
    (`stack`); when KV moves and how fast it has, and who uses it.

    `sessions_by_tier` counts the sessions that have KV. `tenants` is for operators. A tenant that is none sees what its
    own sessions hold and no `cached_bytes`, an empty `moves`, and null for `counts`: those are about all tenants.
    """

    text: TextView
    adapters: AdaptersView
    data: DataView
    stack: StackView
    policy: KVPolicy
    moves: dict[Direction, MovesView]
    counts: CountsView | None
    sessions: int
    sessions_by_tier: dict[Tier, int]
    turns_running: int
    turns_waiting: int
    tenants: dict[str, TenantUseView] | None = None

    @classmethod
    def of(cls, memory: MemoryMap, policy: KVPolicy) -> Self:
        """The wire form of the engine's map."""
        return cls(
            **{name: getattr(memory, name) for name in ("text", "adapters", "stack", "moves", "counts", "sessions")},
            data=DataView.of(memory),
            policy=policy,
            sessions_by_tier={tier: memory.sessions_by_tier.get(tier, 0) for tier in Tier},
            turns_running=memory.running,
            turns_waiting=memory.waiting,
        )

    def with_tenants(self, sessions: Mapping[str | None, Collection[Session]]) -> Self:
        """The map with what each tenant has. That of sessions from before there were tenants is under an empty name."""
        tenants = {owner or "": TenantUseView.of(each) for owner, each in sessions.items()}
        return self.model_copy(update={"tenants": tenants})

    @classmethod
    def of_one(cls, memory: MemoryMap, policy: KVPolicy, sessions: Collection[Session]) -> Self:
        """What one tenant may see, which has these sessions."""
        own, view = TenantUseView.of(sessions), cls.of(memory, policy)
        held = {"device": own.device_bytes, "host": own.host_bytes, "disk": own.disk_bytes}
        data = {tier: getattr(view.data, tier).held(size) for tier, size in held.items()}
        tiers = Counter(session.kv.tier for session in sessions)
        paused = [session.pause.info.bytes for session in sessions if session.pause is not None]
        captured = sum(memory.stack.captures.get(session.id, 0) for session in sessions)
        changed = {
            "data": view.data.model_copy(update=data),
            "stack": StackView(checkpoints=len(paused), checkpoint_bytes=sum(paused), capture_bytes=captured),
            "moves": {},
            "counts": None,
            "sessions_by_tier": {tier: tiers[tier] for tier in Tier},
        }
        counts = own.model_dump(include={"sessions", "turns_running", "turns_waiting"})
        return view.model_copy(update=changed | counts)


class MemoryEstimate(BaseModel):
    """What one session of `tokens` tokens takes, and how many of them the device holds at once.

    `transfer_ms` is how long its KV takes from device to host and back; null where nothing has moved that way yet.
    """

    tokens: int
    blocks: int
    kv_bytes: int
    kv_bytes_per_token: int
    sessions_resident: int
    transfer_ms: dict[Literal["out", "in"], float | None]

    @classmethod
    def of(cls, memory: MemoryMap, tokens: int, bytes_per_s: float | None) -> Self:
        """Whole blocks, as the pool hands them out, moved at `bytes_per_s` or else at the bandwidths measured."""
        blocks = memory.blocks.of(tokens)
        kv_bytes = blocks * memory.block_bytes
        ways: tuple[Literal["out", "in"], ...] = ("out", "in")
        speeds = {way: bytes_per_s or memory.moves[way].bytes_per_s for way in ways}
        return cls(
            tokens=tokens,
            blocks=blocks,
            kv_bytes=kv_bytes,
            kv_bytes_per_token=memory.block_bytes * memory.blocks.in_a_row // memory.blocks.tokens,
            sessions_resident=memory.device.total_bytes // kv_bytes,
            transfer_ms={way: speed and 1000 * kv_bytes / speed for way, speed in speeds.items()},
        )


class CapacityBody(WireModel):
    """What one agent does, again and again, and how soon its first tokens are to come. What is left out is as turns of
    the last minutes had it.
    """

    context_tokens: int | None = Field(None, ge=1, le=10**9, description="of its history, at the end of a turn")
    prompt_tokens: int | None = Field(None, ge=1, le=10**9, description="of a turn, without KV")
    completion_tokens: int | None = Field(None, ge=1, le=10**9, description="that a turn generates")
    think_s: float | None = Field(None, ge=0, le=86_400, description="between turns, with its KV on the device")
    tools_s: float | None = Field(None, ge=0, le=86_400, description="between turns, in which its KV may leave")
    first_token_s: float | None = Field(None, ge=0.01, le=3600, description="the longest wait for a first token")


class AgentView(View):
    """What the estimate rests on."""

    context_tokens: int
    prompt_tokens: int
    completion_tokens: int
    think_s: float
    tools_s: float
    first_token_s: float


class CapacityEstimate(View):
    """How many `more` agents fit beside the `agents` that have KV, and the `limit` that the next one meets.

    `limits` has how many fit under each: null where nothing has been measured yet, or measures would tell of others.
    One agent has `kv_bytes`; its turn takes `turn_s` on a busy server, null where no step was timed.
    """

    agents: int
    more: int
    limit: LimitName
    limits: dict[LimitName, int | None]
    kv_bytes: int
    turn_s: float | None
    agent: AgentView


class EstimateQuery(QueryModel):
    """The size of the session to estimate, and how fast it is to be moved."""

    tokens: int = Field(ge=1, le=10**9)
    bandwidth: float | None = Field(
        None, ge=1, le=1e15, description="bytes per second (default: what has been measured each way)"
    )
