"""What clients see of the inside of the model, as data: checkpoints, captures, maps, and what they upload to read them.

Of uploads, a vector is numbers and nothing else. Of the others this says what they are; their numbers are in a file. No
third-party imports.
"""

from dataclasses import dataclass
from enum import StrEnum

from app.domain.breakpoints import Intervention, Pass, TensorData, TensorParts
from app.domain.points import Point
from app.domain.values import SamplingParams, StopRule


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A paused pass over positions `[first, end)`, stopped at a `point` of `layer` with `hidden_size` numbers at each
    position, in `dtype`. `breakpoint` is None where `until` stopped it.
    """

    layer: int
    first: int
    end: int
    hidden_size: int
    dtype: str
    bytes: int
    in_pass: Pass
    breakpoint: str | None
    saved_ms: float
    """How long the engine took to leave the batch with it."""
    created_at: float
    """Unix seconds."""
    point: Point = Point.RESID_POST


@dataclass(frozen=True, slots=True)
class ResumeCost:
    """Time of the engine's thread that a resume took."""

    dispatch_ms: float
    """To carry out the command."""
    restore_ms: float
    """To put the checkpoint back into the batch: on a CPU the copy, on a GPU only its launch, as nobody waits for the
    copy itself."""


@dataclass(frozen=True, slots=True)
class Activation:
    """What stands at a `point` of `layer`, at positions `[first, end)`."""

    layer: int
    first: int
    end: int
    tensor: TensorData
    point: Point = Point.RESID_POST


@dataclass(frozen=True, slots=True)
class Capture:
    """What a `capture` breakpoint recorded in one pass at a `point` of `layer`.

    `tensor` is `[len(positions), width]`; where there are heads `[len(positions), heads, head_dim]`; of patterns
    `[len(positions), heads, keys]` up to the last key of the pass, 0 behind each position. `heads` are which.
    """

    breakpoint: str
    layer: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    tensor: TensorParts
    point: Point = Point.RESID_POST
    heads: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Captures:
    """Everything recorded so far, oldest first. `dropped` more found no room."""

    records: tuple[Capture, ...]
    dropped: int


MAX_MAP_POSITIONS = 64
"""Of a map in one call."""


@dataclass(frozen=True, slots=True)
class MapLayer:
    """The `positions`, in order, whose residual stream after `layer` is kept."""

    layer: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ActivationMap:
    """Which residual streams of a session are kept at positions `[first, end)`: those that were captured, and the
    checkpoint of a paused turn. `layers` go upward; one without such a position is left out.

    `kept_first` and `kept_end` are the first and the end of all positions that have any; both are 0 if none has.
    """

    first: int
    end: int
    kept_first: int
    kept_end: int
    token_ids: tuple[int, ...]
    """Those that stand at `[first, end)`."""
    layers: tuple[MapLayer, ...]

    @property
    def count(self) -> int:
        """How many residual streams the map has."""
        return sum(len(each.positions) for each in self.layers)


@dataclass(frozen=True, slots=True)
class LensRows:
    """What the model would say of some residual streams if its last layers were left out: for each, token ids with
    natural-log probabilities, best first.

    Those of a checkpoint are at the positions from `first` on, where `token_ids` stand. For each stream, `chosen` has
    the rank (from 0) and the log-probability of each token that was chosen, and `measures`, if they were asked for, the
    entropy, and the divergence to it (Kullback-Leibler) of what the model says at last: NaN if that is not kept. Both
    are in nats. Beside another session, `others` has the divergence from what the lens says there to what it says here,
    NaN if nothing is kept there, and the tokens whose probability differs most, with what it is more here.
    """

    rows: tuple[tuple[tuple[int, float], ...], ...]
    first: int = 0
    token_ids: tuple[int, ...] = ()
    chosen: tuple[tuple[tuple[int, float], ...], ...] = ()
    measures: tuple[tuple[float, float], ...] = ()
    others: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class LensAsk:
    """What a lens is to tell of each residual stream: the `top_k` likeliest tokens, those that are `chosen`, and with
    `measures` the entropy and the divergence. `lens` is the digest of uploaded matrices, empty: there are none; with
    `adds`, what they make of the stream is added to it.
    """

    top_k: int
    lens: str = ""
    adds: bool = False
    chosen: tuple[int, ...] = ()
    measures: bool = False


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """What a dictionary makes of some of a map's streams: features that are active, most first, with their activations,
    and the activations of `chosen` ones.
    """

    rows: tuple[tuple[tuple[int, float], ...], ...]
    chosen: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Attribution:
    """What parts of a pass add to the difference of two logits at one position. Each of `parts` is a layer and a point,
    and what it adds: at `resid_post` all that the stream has gained since the part before. Where `z` or `mlp_post` is
    kept, `units` has what heads, or the most important neurons, of that point and layer add. `total` is the difference
    that the model itself makes.
    """

    position: int
    parts: tuple[tuple[int, Point, float], ...]
    total: float
    units: tuple[tuple[int, Point, tuple[tuple[int, float], ...]], ...] = ()


MAX_CAPTURE_BYTES = 64 << 20
"""Most bytes of captures that one session may keep in host memory."""


@dataclass(frozen=True, slots=True)
class ActivationNorms:
    """The L2 length of each residual stream of `map`, layer by layer, and its cosine to a vector, if there was one."""

    map: ActivationMap
    norms: tuple[tuple[float, ...], ...]
    cosines: tuple[tuple[float, ...], ...] | None


@dataclass(frozen=True, slots=True)
class PausedTurn:
    """A paused turn as it travels with an exported session. What it has generated is in the history."""

    sampling: SamplingParams
    stop: StopRule
    prompt_tokens: int
    checkpoint: CheckpointInfo
    hidden: TensorData
    """The checkpoint's residual stream."""
    interventions: tuple[Intervention, ...]
    """All of the session's, those of the paused pass included."""
    cached_tokens: int = 0
    """As the turn's usage will have it, and so the next one. A file does not say it, as it may be forged."""
    tokens_recomputed: int = 0


class UploadKind(StrEnum):
    """Each owner has names of their own for each kind."""

    VECTOR = "vector"
    DICTIONARY = "dictionary"
    LENS = "lens"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class UploadKey:
    """An owner's upload of that kind and name. `owner` is the tenant's name (None: there are no keys)."""

    owner: str | None
    kind: UploadKind
    name: str


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The file of an upload: SHA-256 over its bytes, in hexadecimal digits, and how many there are."""

    digest: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Dictionary:
    """A sparse autoencoder or a transcoder (Bricken et al., *Towards Monosemanticity*, 2023). Of `x` `[width]` at
    `point` of `layer`, feature i has the activation `a = relu(scale * z + bias)` if `z + gate > threshold`, else 0,
    where `z = x . encoder[i]`; with `k`, only the k largest of them are not 0. `decoder[i]` is what it adds to the
    point `writes`, per unit of its activation.

    The file has `encoder` `[features, width]`, `decoder` `[features, writes_width]`, and `scale`, `bias`, `gate` and
    `threshold` `[features]` each, all in float32. What the uploaded format does to its input is folded into them.
    """

    file: StoredFile
    architecture: str
    layer: int
    point: Point
    width: int
    features: int
    writes: Point
    """A point of the same layer. Only a transcoder writes to another one than `point`."""
    k: int | None = None
    neuronpedia_id: str | None = None


class LensKind(StrEnum):
    """What a lens makes of the residual stream `h` after a layer, before the final norm and the head."""

    TUNED = "tuned"
    """`h + W h + b` (Belrose et al., arXiv:2303.08112)"""
    JACOBIAN = "jacobian"
    """`W h + b`, where `W` is what the layers above do to small changes of `h`, on average"""


@dataclass(frozen=True, slots=True)
class Translators:
    """A lens: for each of `layers` a matrix and, if it has one, a bias. The file has `{layer}.weight` `[hidden_size,
    hidden_size]` and `{layer}.bias` `[hidden_size]`, in float32.
    """

    file: StoredFile
    lens: LensKind
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredProbe:
    """A probe of `x` `[width]` at `point` of `layer`: `weight . x + bias`, or with `hidden` neurons `weight2 .
    relu(weight x + bias) + bias2`; with `sigmoid` the logistic function of that. The file has `weights`, all of these
    numbers, one behind the other, in float32.
    """

    file: StoredFile
    layer: int
    point: Point
    width: int
    hidden: int
    sigmoid: bool


Uploaded = Dictionary | Translators | StoredProbe
"""What has a file."""
Upload = TensorData | Uploaded
