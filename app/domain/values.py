"""The vocabulary that every room shares: ids, enums and small frozen values. No third-party imports."""

from __future__ import annotations

import dataclasses
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType, Protocol, TypeVar

from app.domain.points import Points


class GrammarKind(StrEnum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"
    """A JSON list of strings, of which the text is one."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole text of a turn must match. Two with one kind and text are equal, whatever field they came in."""

    kind: GrammarKind
    text: str
    field: str = dataclasses.field(compare=False)
    """The request's field that it came in, for errors."""
    parts: tuple[tuple[str, Grammar], ...] = dataclasses.field(default=(), compare=False, repr=False)
    """Grammars that it was made from, each with its name: an error tells of the part that is wrong."""


SessionId = NewType("SessionId", str)
Ticket = NewType("Ticket", int)
"""One per command: every event that answers a command carries the command's ticket."""


class SessionState(StrEnum):
    """Where a session is in its life. `closed` is final."""

    IDLE = "idle"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    CLOSED = "closed"


class Phase(StrEnum):
    """What a client says its session is doing. A turn makes it `compute`."""

    COMPUTE = "compute"
    IO_WAIT = "io_wait"
    """A tool runs; the session will be back."""
    READY = "ready"
    """About to go on."""
    IDLE = "idle"
    """Gone for long."""


class Tier(StrEnum):
    """Where a session's KV is, or where it is moving. A session without KV has none."""

    DEVICE = "device"
    TO_HOST = "to_host"
    HOST = "host"
    TO_DISK = "to_disk"
    DISK = "disk"
    TO_DEVICE = "to_device"


class KVPolicy(StrEnum):
    """When KV leaves the device: on what clients signal, only under pressure, or never (it is dropped instead)."""

    SIGNAL = "signal"
    LRU = "lru"
    NONE = "none"


AUTO_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""What `--dtype auto` computes in, on each kind of device."""


class WeightsDtype(StrEnum):
    """As what a model's matrices are kept. Norms and biases are always in the data type of the computation."""

    CHECKPOINT = "checkpoint"
    """As they are stored: any float type, or the blocks of a GGUF file."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    """Blocks of 32 integers with a scale, GGUF's Q8_0."""
    FLOAT8 = "float8"
    """E4M3, with a scale for each output."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Room for KV: so many bytes, or `sessions` sessions of `tokens` tokens each."""

    bytes: int = 0
    sessions: int = 0
    tokens: int = 0

    def blocks(self, block_bytes: int, block_size: int) -> int:
        """Whole blocks of `block_bytes` bytes and `block_size` tokens that the budget pays for."""
        return self.bytes // block_bytes if self.bytes else self.sessions * -(-self.tokens // block_size)


class Residency(StrEnum):
    """What a session's KV may be asked to do for others."""

    BEST_EFFORT = "best_effort"
    GUARANTEED = "guaranteed"
    """Its KV never gives way: room for a full context is set aside for it."""


class FinishReason(StrEnum):
    """Why a turn ended. `stop` and `length` mean what they mean in the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    PROBE = "probe"
    """A probe found more than it may."""
    SHUTDOWN = "shutdown"
    """The server ended while the turn was paused."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the logits.

    `temperature` 0 is greedy. `top_k` 0 and `min_p` 0 are off. `seed` is always set: whoever accepts a request
    without one draws it, so that a turn can be replayed. `logprobs` is the number of alternatives to report per
    token (0: only the chosen token; None: report nothing). `prompt_logprobs` asks the same of the prompt tokens. With a
    `grammar`, only tokens are chosen that its text may go on with.
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What `SamplingParams` has where a client leaves it out. These are neutral; a model may recommend others."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


NEUTRAL = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a turn ends by itself: a token of `stop_token_ids` after at least `min_tokens`, or `max_tokens`.

    `max_tokens` 0 computes the prompt and samples nothing. `ignore_eos` is an empty `stop_token_ids`.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one position: the token that stands there, and the `top` alternatives, best
    first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """What one turn cost, in tokens.

    `prompt_tokens` is the whole context the turn started from; `cached_tokens` of them had their KV already.
    `tokens_recomputed` counts tokens that had had their KV, in an earlier turn or before this one gave way to another,
    and lost it.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    tokens_recomputed: int = 0


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """Where a session began: as a fork of another one, whose history had `tokens` tokens then."""

    session: SessionId
    tokens: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the rest of the server needs to know about the loaded model. Sizes in tokens, elements and bytes."""

    name: str
    max_model_len: int
    vocab_size: int
    num_layers: int
    hidden_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    device: str
    parameter_bytes: int
    kv_bytes_per_token: int
    kv_dtype: str
    state_bytes: int = 0
    """Of a session, whatever its length: what layers that fold remember."""
    adapters: tuple[LoadedAdapter, ...] = ()
    """Those of the setting `lora`, in its order."""
    points: Points = field(default_factory=dict)
    """What can be seen and changed in a pass."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a session's history is computed with. `digest` is SHA-256 over its files, in hexadecimal
    digits; `name` is what clients call it by.
    """

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What the engine says of an adapter: the bytes that it takes, its largest rank, how many modules it changes."""

    digest: str
    nbytes: int
    rank: int
    modules: int


MAX_LABEL_BYTES = 192 << 20
"""Of what the file of an exported session says beside its history and KV, as JSON: 64 MiB of tensors of the session's
edits, and as many others of its paused turn, have 171 MiB in base64. 21 MiB are left for metadata, breakpoints, the
checkpoint and log-probabilities.
"""

EARLY_WAITS = 0.2
"""Share of waits of a kind that are over before a session is expected. KV that is early takes room; late KV delays."""

MAX_NAME = 256
"""Characters of a name that a caller gives a session."""


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit but the server's."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    turns_at_once: int | None = None
    """Turns that wait, run or are paused."""
    sessions: int | None = None
    guaranteed_sessions: int | None = None
    import_bytes: int | None = None
    device_bytes: int | None = None
    """KV of the contexts of turns that wait, run or are paused."""
    host_bytes: int | None = None
    """KV in host memory."""


NO_LIMITS = Limits()

Settle = Callable[[int], None]
"""Takes how many of the reserved tokens were used, once, when that is known."""


class Quotas(Protocol):
    """What the owners of sessions may use, as the sessions ask for it. Used on the event loop only."""

    def limits(self, owner: str | None) -> Limits:
        """What the owner may use."""
        ...

    def reserve(self, owner: str | None, tokens: Sequence[int]) -> list[Settle]:
        """Count the tokens of each turn before it is known how many they will be: those of all turns, or none.

        Raises `RateLimited`, but not for 0 tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class JournalState:
    """`failure` is why the journal cannot be written, None if it can be; `is_full`: because there is no room for it.
    `waiting` counts sessions, uploads and responses with changes that are not in it yet. `epoch` is that of the lease
    of the folder, None without one; `is_fenced`: the lease is not held.
    """

    failure: str | None = None
    is_full: bool = False
    waiting: int = 0
    epoch: int | None = None
    is_fenced: bool = False


NO_JOURNAL = JournalState()
"""A server that keeps nothing has nothing to write."""


TokenIds = TypeVar("TokenIds", "array[int]", tuple[int, ...])
"""What can be compared a part at a time, without a step of Python for each token."""


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """How many tokens `a` and `b` begin with in common; nearly always all of one of them."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return bisect_left(range(shorter), True, key=lambda length: a[: length + 1] != b[: length + 1])
