"""What the server answers about its memory, as frozen values. All sizes are in bytes."""

from typing import Literal

from client.answer import Answer
from client.models import Tier

Direction = Literal["out", "in", "to_disk", "from_disk"]
"""Which way KV moves: between device and host, or between host and disk."""


class TierUse(Answer):
    """KV in one tier: what there is room for, what sessions hold, and what is only kept for reuse and gives way."""

    total_bytes: int
    owned_bytes: int
    cached_bytes: int


class Data(Answer):
    """KV in every tier, in blocks of `block_tokens` tokens that take `block_bytes`."""

    device: TierUse
    host: TierUse
    disk: TierUse
    block_bytes: int
    block_tokens: int


class Adapters(Answer):
    """LoRA adapters that are loaded: their number, the bytes that they take on the device, and most that they may."""

    count: int
    bytes: int
    limit_bytes: int


class Stack(Answer):
    """Residual streams in host memory: those of `checkpoints` paused turns, and captures."""

    checkpoints: int
    checkpoint_bytes: int
    capture_bytes: int


class Moves(Answer):
    """What has moved one way since the server started. `bytes_per_s` is measured: None before the first move."""

    count: int
    bytes: int
    seconds: float
    bytes_per_s: float | None


class Counts(Answer):
    """What happened to KV since the server started.

    `write_behind_bytes` left early, without anyone waiting; `turned_round` moves were overtaken by a new signal;
    `dropped` sessions lost KV for want of room and `disk_failures` files could not be written or read, which costs a
    recompute; `late_restores` turns found their KV not yet on the device.
    """

    write_behind_bytes: int
    turned_round: int
    dropped: int
    disk_failures: int
    late_restores: int


class Text(Answer):
    """Weights, `total_bytes` of them. The device has `kept_bytes` that stay and `ring_bytes` through which the others
    are streamed, `streamed_bytes` since the start; on a device that keeps all there is no ring.
    """

    total_bytes: int
    kept_bytes: int
    ring_bytes: int
    streamed_bytes: int


class TenantUse(Answer):
    """What one tenant has. KV that sessions share counts for each of them."""

    sessions: int
    turns_running: int
    turns_waiting: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int


class MemoryEstimate(Answer):
    """What one session of `tokens` tokens takes, and how many of them the device holds at once.

    `transfer_ms` is how long its KV takes from device to host (`out`) and back (`in`); None before the first move.
    """

    tokens: int
    blocks: int
    kv_bytes: int
    kv_bytes_per_token: int
    sessions_resident: int
    transfer_ms: dict[Literal["out", "in"], float | None]


class Agent(Answer):
    """What an estimate of the capacity rests on, as `Djinn.capacity` takes it."""

    context_tokens: int
    prompt_tokens: int
    completion_tokens: int
    think_s: float
    tools_s: float
    first_token_s: float


class CapacityEstimate(Answer):
    """How many `more` agents fit beside the `agents` that have KV, and the `limit` that the next one meets.

    `limits` has how many fit under each: None where nothing has been measured yet, or measures would tell of others.
    One agent has `kv_bytes`; its turn takes `turn_s` on a busy server, None where no step was timed.
    """

    agents: int
    more: int
    limit: str
    """`device_memory`, `all_memory`, `running_turns`, `step_rate`, `moves`, `sessions`, or a limit of the tenant:
    `turns_at_once`, `tokens_per_minute`, `requests_per_minute`, `tenant_device_bytes`.
    """
    limits: dict[str, int | None]
    kv_bytes: int
    turn_s: float | None
    agent: Agent


class MemoryMap(Answer):
    """The server's memory: weights (`text`) and adapters to them, KV (`data`) and what paused turns and captures keep
    (`stack`); when KV moves and how fast it has, and who uses it.

    `sessions_by_tier` counts the sessions that have KV. `tenants` is for operators. A tenant that is none sees what its
    own sessions hold and no `cached_bytes`, an empty `moves`, and None for `counts`: those are about all tenants.
    """

    text: Text
    adapters: Adapters
    data: Data
    stack: Stack
    policy: Literal["signal", "lru", "none"]
    moves: dict[Direction, Moves]
    counts: Counts | None
    sessions: int
    sessions_by_tier: dict[Tier, int]
    turns_running: int
    turns_waiting: int
    tenants: dict[str, TenantUse] | None
