"""What the engine says of its memory. Sizes in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from app.domain.values import SessionId, Tier


@dataclass(frozen=True, slots=True)
class TextUse:
    """Weights, `total_bytes` of them. The device has `kept_bytes` that stay and `ring_bytes` through which the others
    are streamed, `streamed_bytes` since the start; on a device that keeps all there is no ring.
    """

    total_bytes: int
    kept_bytes: int
    ring_bytes: int = 0
    streamed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """LoRA adapters that are loaded beside the weights, `bytes` of them; they may have `limit_bytes`."""

    count: int = 0
    bytes: int = 0
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks a session's KV takes. For each `tokens` tokens there are `full` blocks of layers that keep all,
    and `windowed` ones of layers that keep the last `most` times as many. The state of layers that fold takes `state`.
    """

    tokens: int = 1
    full: int = 1
    windowed: int = 0
    most: int = 0
    state: int = 0

    @property
    def in_a_row(self) -> int:
        """Those of the same tokens."""
        return self.full + self.windowed

    def of(self, tokens: int) -> int:
        """Those of a session of so many tokens."""
        times = -(-tokens // self.tokens)
        return self.full * times + self.windowed * min(times, self.most) + self.state if tokens else 0


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """One session's KV: `blocks` that hold `computed_tokens` of its `tokens`, and the bytes of them in each tier.

    `bytes_out` and `bytes_in` have left and come back to the device since the session was opened, in `restores` moves.
    A block takes `block_bytes`. The whole host tier has `host_room`. These and `counts` are not compared.
    """

    tokens: int = 0
    computed_tokens: int = 0
    tier: Tier | None = None
    blocks: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    restores: int = 0
    block_bytes: int = field(default=0, compare=False)
    counts: BlockCounts = field(default=BlockCounts(), compare=False)
    host_room: int = field(default=0, compare=False)

    def grown(self, tokens: int) -> Self:
        """The same once a turn has decoded to a history of so many tokens. Only KV on the device grows. While a prompt
        is computed the engine tells of each part.
        """
        computed, decodes = tokens - 1, self.computed_tokens >= self.tokens - 1
        blocks = self.counts.of(computed)
        if self.tier is not Tier.DEVICE or not decodes or blocks <= self.blocks:
            return self
        size = max(self.device_bytes, blocks * self.block_bytes)
        return replace(self, tokens=tokens, computed_tokens=computed, blocks=blocks, device_bytes=size)


@dataclass(frozen=True, slots=True)
class TierUse:
    """KV in one tier: its budget, what sessions hold, what is only kept for reuse, in bytes."""

    total_bytes: int
    owned_bytes: int
    cached_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MoveTotals:
    """What has been moved one way since the start, and how long the copies themselves took."""

    moves: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """The bandwidth of the copies themselves; None if there were none, or none that took time."""
        return self.bytes / self.seconds if self.seconds else None


@dataclass(slots=True)
class TierCounts:
    """What happened to KV since the start.

    `write_behind_bytes` left early, without anyone waiting; `turned_round` moves were overtaken by a new signal;
    `dropped` sessions lost KV for want of room in a lower tier, `disk_failures` files could not be written or read
    (they are recomputed too); `late_restores` turns found their KV not yet on the device.
    """

    write_behind_bytes: int = 0
    turned_round: int = 0
    dropped: int = 0
    disk_failures: int = 0
    late_restores: int = 0


@dataclass(frozen=True, slots=True)
class StackUse:
    """Residual streams in host memory: those of `checkpoints` paused turns, and captures; `captures` has the bytes of
    each session that has some.
    """

    checkpoints: int = 0
    checkpoint_bytes: int = 0
    capture_bytes: int = 0
    captures: Mapping[SessionId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Steps since the start: `replayed` ones were recorded decode steps, those `in_runs` were too, in runs of layers
    between which something was done to a row; `eager` ones ran layer by layer, at least in part. `followed` of all were
    given to the device while it ran the one before. Each part counts of one that did not fit whole. `tokens` are all
    that they computed.
    """

    replayed: int = 0
    in_runs: int = 0
    eager: int = 0
    followed: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Tokens since the start that were `drafted`, and those of them that were `accepted`: a step each less."""

    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """The engine's memory, in bytes, and how busy it is.

    `sessions_by_tier` counts sessions that have KV; `moves` is keyed `out` (device to host), `in`, `to_disk`,
    `from_disk`. The engine took `seconds` to make it.
    """

    text: TextUse
    adapters: AdapterUse
    device: TierUse
    block_bytes: int
    blocks: BlockCounts
    sessions: int
    sessions_by_tier: Mapping[Tier, int]
    host: TierUse
    disk: TierUse
    moves: Mapping[str, MoveTotals]
    counts: TierCounts
    running: int
    waiting: int
    steps: StepCounts
    drafts: DraftCounts
    stack: StackUse
    seconds: float
