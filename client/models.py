"""What the server answers, as frozen values."""

from typing import Literal

from client.answer import Answer, Listing
from client.breakpoint_models import CheckpointInfo, FeatureActivation
from client.pictures import facts, svg

SessionState = Literal["idle", "queued", "running", "paused", "closed"]
Phase = Literal["compute", "io_wait", "ready", "idle"]
Residency = Literal["best_effort", "guaranteed"]
Tier = Literal["device", "to_host", "host", "to_disk", "disk", "to_device"]
FinishReason = Literal["stop", "length", "cancelled", "probe", "shutdown"]

TINTS = {"device": "#12636c", "host": "#8a5a00", "disk": "#5d4b9a", "paused": "#5d4b9a", "other": "#1d6b3a"}
"""Colours of tiers and states in pictures, those of the server's page."""


class Usage(Answer):
    """What one turn cost, in tokens.

    `prompt_tokens` is the whole context the turn started from; `cached_tokens` of them had their KV already;
    `tokens_recomputed` of them had had it in an earlier turn and lost it.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_recomputed: int


class Alternative(Answer):
    """A token that could stand at a position, with its natural-log probability."""

    token_id: int
    logprob: float


class TokenLogprobs(Alternative):
    """The token that stands at a position, and the most likely ones there, best first."""

    top: tuple[Alternative, ...]


class TokenEvent(Answer):
    """Newly generated tokens, and the text that they made certain.

    `text` lags behind while a character or a possible stop string is incomplete, so either field can be empty.
    `logprobs` has one entry per token if the turn asked for them, else it is None.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


class ProbeReading(Answer):
    """What a probe has found at `positions` of the history: a value for each. `halts`: the turn stops or pauses."""

    probe: str
    positions: tuple[int, ...]
    values: tuple[float | None, ...]
    halts: bool


class FeaturesReading(Answer):
    """The most active features of a dictionary at `positions` of the history: for each some, the most active first."""

    dictionary: str
    positions: tuple[int, ...]
    top: tuple[tuple[FeatureActivation, ...], ...]


class Turn(Answer):
    """A turn that is over or paused: everything it has generated, why it ended, and what it has cost.

    One that is paused has a `checkpoint` and no `finish_reason`.
    """

    status: Literal["finished", "paused"]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    usage: Usage
    checkpoint: CheckpointInfo | None
    probes: tuple[ProbeReading, ...] | None = None
    features: tuple[FeaturesReading, ...] | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class KV(Answer):
    """Where a session's KV is; `tier` is None when it has none."""

    tier: Tier | None
    blocks: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int


class ResumeTimes(Answer):
    """What the last turn's time to first token was made of, in milliseconds.

    `restore` is the wait for KV on its way back to the device, `queue` any other wait.
    """

    queue: float
    restore: float
    prefill: float


class SessionUsage(Usage):
    """Totals over a session's turns, in tokens and in bytes moved out of the device and back.

    `last_turn` is the usage of the last turn alone.
    """

    bytes_out: int
    bytes_in: int
    restores: int
    resume_ms: ResumeTimes
    last_turn: Usage | None


class ForkPoint(Answer):
    """The session that another one was forked from, and the length of its history then."""

    session_id: str
    tokens: int


class InterruptedTurn(Answer):
    """A turn that paused `at` that time, in Unix seconds, and that a restart of the server ended. So many tokens of the
    history were lost with it.
    """

    at: float
    layer: int
    point: str
    tokens_lost: int


class SessionInfo(Answer):
    """A session as it was when the server answered. `tokens` is the length of its history; times are Unix seconds.

    `checkpoint` is there while it is paused, `interrupted_turn` from a restart that ended a pause to the next turn;
    `breakpoints` are ids of those that are armed. `used_at` is when a turn last began, paused or ended, or items came
    to its conversation. `tenant` is whose it is, None on a server without keys. `adapter` is the LoRA adapter that it
    is computed with, None for the base alone.
    """

    id: str
    tenant: str | None
    state: SessionState
    phase: Phase
    residency: Residency
    adapter: str | None
    tokens: int
    kv: KV
    checkpoint: CheckpointInfo | None
    interrupted_turn: InterruptedTurn | None
    breakpoints: tuple[str, ...]
    usage: SessionUsage
    forked_from: ForkPoint | None
    metadata: dict[str, str]
    created_at: float
    used_at: float
    returns_at: float | None
    expires_at: float | None

    def _repr_svg_(self) -> str:
        lines = [f"{self.tokens} tokens, {len(self.breakpoints)} breakpoints, {self.residency}, phase {self.phase}"]
        if self.checkpoint is not None:
            place = self.checkpoint
            lines.append(f"paused at {place.point} of layer {place.layer}, positions {place.first} to {place.end - 1}")
        lines += [f"{name}: {value}" for name, value in sorted(self.metadata.items())]
        sizes = {"device": self.kv.device_bytes, "host": self.kv.host_bytes, "disk": self.kv.disk_bytes}
        most = max(1, *sizes.values())
        bars = [(f"KV, {tier}: {size / 2**20:.1f} MiB", size / most, TINTS[tier]) for tier, size in sizes.items()]
        color = TINTS.get(self.state, TINTS["other"])
        return svg([facts(self.id, (self.state, color), lines, bars)])


class History(Answer):
    """Every token of a session: `token_ids[i]` stands at position i. `text` shows special tokens too.

    `pieces` are parts of `text`: `pieces[i]` is what token i completes. None unless asked for.
    """

    tokens: int
    token_ids: tuple[int, ...]
    text: str
    pieces: tuple[str, ...] | None


class SessionPage(Listing[SessionInfo]):
    """One page of the list of sessions."""

    has_more: bool

    @property
    def next_after(self) -> str | None:
        """The `after` that asks for the next page; None if there is none."""
        return self.data[-1].id if self.has_more and self.data else None


class Moving(Answer):
    """KV on its way: where to, and how many bytes."""

    to: Tier
    bytes: int


class PhaseChange(Answer):
    """The session's phase, where its KV is, and what is on its way there."""

    phase: Phase
    tier: Tier | None
    moving: Moving | None


class Move(Answer):
    """Where a session has moved: to the server `replica` of the cluster, which is asked at `url`.

    Of its `tokens` the first `tokens_with_kv` need not be recomputed. `bytes` were sent; it took `seconds`.
    """

    id: str
    replica: str
    url: str
    tokens: int
    tokens_with_kv: int
    bytes: int
    seconds: float


class Tokenized(Answer):
    """What a text becomes."""

    tokens: tuple[int, ...]


class Detokenized(Answer):
    """What tokens become."""

    prompt: str


class Version(Answer):
    """What runs on the server. The model computes in `dtype`, and its KV is kept as `kv_dtype`. `chat`: it has a chat
    template.
    """

    version: str
    model: str
    device: str
    dtype: str
    kv_dtype: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    chat: bool


class Health(Answer):
    """The server is alive (`ok`) or takes new work (`ready`)."""

    status: str


class DefaultSampling(Answer):
    """What the arguments of these names are in a turn that leaves them out."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Model(Answer):
    """A model that the server runs: its name in the OpenAI routes, and how many tokens fit in a session. A LoRA adapter
    has the base's name as its `parent`, and as its `root` SHA-256 over its files.

    Breakpoints are after layers 0 to `layers` - 1, where the residual stream has `hidden_size` elements a position.
    """

    id: str
    root: str
    parent: str | None
    max_model_len: int
    layers: int
    hidden_size: int
    chat_format: str
    """How the model talks, such as `hermes+think`: how it calls tools, and how it thinks."""
    default_sampling: DefaultSampling
