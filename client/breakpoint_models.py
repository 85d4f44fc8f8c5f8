"""What the server answers about breakpoints, checkpoints and vectors, as frozen values."""

from math import exp
from typing import Literal

from pydantic import Field

from client.answer import Answer
from client.pictures import Cell, heatmap, shown, svg

Pass = Literal["prefill", "decode", "any"]
Action = Literal["pause", "capture", "edit", "probe", "features"]
Op = Literal["scale", "add", "replace", "project_out", "clamp", "ablate"]
OnTimeout = Literal["resume", "abort"]
LensKind = Literal["tuned", "jacobian"]
Dtype = Literal["float32", "float16", "bfloat16"]
Positions = Literal["all", "last"] | tuple[int, int]
"""Positions of a session's history: all of a pass, the last of its context, or from the first to before the second."""


class CheckpointInfo(Answer):
    """A pass over positions `[first, end)` of the history, stopped at a `point` of `layer`.

    What stands there, of `shape` `[end - first, hidden_size]` in `dtype`, takes `bytes`: the residual stream, or as
    many numbers as the point is wide. `breakpoint` is the id of
    what stopped it, None if `until` did. `saved_ms` is how long the engine took to put it aside, `age_s` how long ago.
    Times are Unix seconds; `expires_at` is None if the pause was over before the answer.
    """

    layer: int
    point: str
    first: int
    end: int
    shape: tuple[int, int]
    hidden_size: int
    dtype: Dtype
    bytes: int
    in_pass: Pass = Field(alias="pass")
    breakpoint: str | None
    saved_ms: float
    created_at: float
    age_s: float
    expires_at: float | None


class When(Answer):
    """Which positions a breakpoint is for; what is None holds everywhere."""

    in_pass: Pass = Field(alias="pass")
    position: int | None
    token_id: int | None
    every: int | None


class EditVector(Answer):
    """The vector of an edit: how many numbers it has, and its length (L2). With `rows` each position has its own."""

    size: int
    norm: float
    rows: int | None = None


class EditGate(Answer):
    """Where an edit is made: where the scalar product with `along` is above a number, below one, or both."""

    along: EditVector
    above: float | None
    below: float | None


class FeatureRule(Answer):
    """How a feature's activation follows from `z`, the product with its encoder: `relu(scale * z + bias)` where `z +
    gate > threshold`, else 0.
    """

    scale: float
    bias: float
    gate: float
    threshold: float
    k: int | None
    reads: str | None


class EditInfo(Answer):
    """One change that a breakpoint makes; what does not go with `op` is None."""

    op: Op
    factor: float | None
    vector: EditVector | None
    feature: FeatureRule | None
    heads: tuple[int, ...] | None
    neurons: tuple[int, ...] | None
    experts: tuple[int, ...] | None
    positions: Positions
    keep_norm: bool
    max_norm: float | None
    when: EditGate | None


class ProbeGuard(Answer):
    """A probe that a breakpoint reads, and what becomes of the turn where it finds more than `above`."""

    name: str
    above: float | None
    then: Literal["stop", "pause"] | None


class TopFeatures(Answer):
    """A dictionary that a breakpoint reads, and how many features it tells of each position."""

    dictionary: str
    top_k: int


class BreakpointInfo(Answer):
    """A breakpoint: what it does at a `point` of each of `layers`, and when. Of `heads`, it captures only those named.
    The last two are None unless it pauses.
    """

    id: str
    point: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    action: Action
    when: When
    edits: tuple[EditInfo, ...]
    probe: ProbeGuard | None
    features: TopFeatures | None
    gate: EditGate | None
    once: bool
    timeout_s: float | None
    on_timeout: OnTimeout | None


class Guess(Answer):
    """A token that could come next, with its natural-log probability: None if the checkpoint is not finite there."""

    token_id: int
    text: str
    logprob: float | None


class LensPosition(Answer):
    """The token at a position, and what the model would say next if its last layers were left out, best first."""

    position: int
    token_id: int
    text: str
    top: tuple[Guess, ...]


class Lens(Answer):
    """The logit lens: the final norm and the head applied after `layer`."""

    layer: int
    positions: tuple[LensPosition, ...]


class LensMapLayer(Answer):
    """The lens after one layer, with a tuple for each position, best first: empty where nothing is kept.

    `ranks` and `chosen_logprobs` are of the tokens that were named. `entropies`, and `divergences` from what the model
    says at last, are there if they were asked for, in nats. So is what differs from the session `beside` it: the
    divergence from there, and the tokens whose probability differs most, with what it is more here.
    """

    layer: int
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float | None, ...], ...]
    ranks: tuple[tuple[int, ...], ...] = ()
    chosen_logprobs: tuple[tuple[float | None, ...], ...] = ()
    entropies: tuple[float | None, ...] = ()
    divergences: tuple[float | None, ...] = ()
    beside_divergences: tuple[float | None, ...] = ()
    changed_token_ids: tuple[tuple[int, ...], ...] = ()
    changes: tuple[tuple[float | None, ...], ...] = ()


class LensMap(Answer):
    """The logit lens over layers and positions `[first, end)`, where `token_ids` stand. `texts` is by token id.

    The server keeps residual streams of positions from `kept_first` to before `kept_end`.
    """

    first: int
    end: int
    kept_first: int
    kept_end: int
    token_ids: tuple[int, ...]
    layers: tuple[LensMapLayer, ...]
    texts: dict[int, str]

    def _repr_svg_(self) -> str | None:
        if not self.layers:
            return None
        columns = [shown(self.texts.get(token, str(token))) for token in self.token_ids]
        cells = [[self._cell(layer, at) for at in range(len(columns))] for layer in self.layers]
        caption = f"what each layer would say next, at positions {self.first} to {self.end - 1}"
        return svg([heatmap(caption, columns, [str(layer.layer) for layer in self.layers], cells)])

    def _cell(self, layer: LensMapLayer, at: int) -> Cell | None:
        """The likeliest token; the bluer, the likelier."""
        if not layer.token_ids[at]:
            return None
        best = [self.texts.get(token, str(token)) for token in layer.token_ids[at]]
        chances = [0.0 if logprob is None else exp(logprob) for logprob in layer.logprobs[at]]
        told = ", ".join(f"{shown(text, 40)} {chance:.3f}" for text, chance in zip(best, chances, strict=True))
        return Cell(shown(best[0]), chances[0], f"layer {layer.layer}, position {self.first + at}: {told}")


class NormsLayer(Answer):
    """L2 lengths after one layer, and cosines to the vector that was named; None where there is none."""

    layer: int
    norms: tuple[float | None, ...]
    cosines: tuple[float | None, ...] | None


class Norms(Answer):
    """How long residual streams are, over the same map as `LensMap`, and how they lie to a vector."""

    first: int
    end: int
    kept_first: int
    kept_end: int
    token_ids: tuple[int, ...]
    layers: tuple[NormsLayer, ...]


class PointInfo(Answer):
    """A point of the model's pass, in the `layers` that have it (None: it is in no layer): `width` numbers at a
    position, divided among `heads` if it has some. Reasons say why it cannot be edited or paused at.
    """

    name: str
    aliases: tuple[str, ...]
    meaning: str
    layers: tuple[int, ...] | None
    width: int
    heads: int | None
    no_edit: str | None
    no_pause: str | None


class VectorInfo(Answer):
    """A vector on the server: its name, how many numbers it has, their type, and its length (L2)."""

    name: str
    size: int
    dtype: Dtype
    norm: float


class DictionaryInfo(Answer):
    """A dictionary of `features` features on the server, which are read at `point` of `layer`. `url` is where
    Neuronpedia shows one of them, with `{feature}` in the place of its index; None: it is not known there.
    """

    name: str
    architecture: str
    layer: int
    point: str
    writes: str
    width: int
    features: int
    k: int | None
    bytes: int
    loaded: bool
    url: str | None


class FeatureActivation(Answer):
    """How active a feature is: None if that is not finite."""

    index: int
    activation: float | None


class FeaturesPosition(Answer):
    """The features at a position where `token_id` stands: the most active, most first, and those asked for."""

    position: int
    token_id: int
    text: str
    top: tuple[FeatureActivation, ...]
    chosen: tuple[FeatureActivation, ...]


class Features(Answer):
    """What a dictionary makes of a session, for each of the `positions` that the server keeps of those asked for."""

    dictionary: str
    layer: int
    point: str
    kept_first: int
    kept_end: int
    positions: tuple[FeaturesPosition, ...]
    url: str | None


class LensInfo(Answer):
    """A lens on the server, with matrices for the streams after `layers`."""

    name: str
    kind: LensKind
    layers: tuple[int, ...]
    bytes: int
    loaded: bool


class ProbeInfo(Answer):
    """A probe on the server, of `point` of `layer`, with so many `hidden` neurons: 0 if it is linear."""

    name: str
    layer: int
    point: str
    width: int
    hidden: int
    output: str


class AttributionPart(Answer):
    """What attention, a feed-forward or a stretch of layers adds to a difference of logits. At `resid_post` it is what
    the stream has gained since the part before at that point.
    """

    layer: int
    point: str
    value: float | None


class AttributionUnit(Answer):
    """What a head, or a neuron, adds, by its number."""

    index: int
    value: float | None


class AttributionUnits(Answer):
    """All heads of a layer, at `z`, or its most important neurons, at `mlp_post`."""

    layer: int
    point: str
    units: tuple[AttributionUnit, ...]


class Attribution(Answer):
    """The difference of two tokens' logits at a position, and what parts add to it; heads and neurons where `z` and
    `mlp_post` were recorded.
    """

    position: int
    tokens: tuple[int, int]
    total: float | None
    parts: tuple[AttributionPart, ...]
    units: tuple[AttributionUnits, ...] = ()
