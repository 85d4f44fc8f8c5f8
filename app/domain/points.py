"""The points of a forward pass at which a session can be looked at, changed or stopped. No third-party imports.

Names follow TransformerLens, whose spellings and those of interp-engine are understood too. All but a few are points
of a layer. The place of a point is `(boundary, order)`: what is done in a pass is done in the order of places. Boundary
k + 1 is behind layer k, and all points of layer k belong to it: their order tells where in the layer they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Point(StrEnum):
    """In the order of a pass. `resid_post` is the residual stream between two layers."""

    EMBED = "embed"
    RESID_PRE = "resid_pre"
    ATTN_IN = "attn_in"
    Q = "q"
    K = "k"
    V = "v"
    Q_ROT = "q_rot"
    K_ROT = "k_rot"
    PATTERN = "pattern"
    Z = "z"
    ATTN_OUT = "attn_out"
    RESID_MID = "resid_mid"
    MLP_IN = "mlp_in"
    ROUTER_LOGITS = "router_logits"
    EXPERTS = "experts"
    MLP_PRE = "mlp_pre"
    MLP_POST = "mlp_post"
    MLP_OUT = "mlp_out"
    STATE = "state"
    RESID_POST = "resid_post"
    FINAL_NORM = "final_norm"
    LOGITS = "logits"


class Axis(StrEnum):
    """What the numbers of a point at one position are."""

    HIDDEN = "hidden"
    """The width of the residual stream."""
    HEADS = "heads"
    """One head behind the other, `[heads * head_dim]`."""
    NEURONS = "neurons"
    EXPERTS = "experts"
    KEYS = "keys"
    """For each chosen head the probabilities of all keys up to the position, `[heads, keys]`."""
    STATE = "state"
    VOCABULARY = "vocabulary"


_NO_TENSOR = "it is computed from the queries and keys when it is captured: attention never has it as a tensor"


@dataclass(frozen=True, slots=True)
class About:
    """What is true of a point in every model that has it. A reason says why something cannot be done there."""

    axis: Axis
    meaning: str
    no_edit: str | None = None
    no_pause: str | None = None

    @property
    def edits(self) -> bool:
        """Whether edits can be made there."""
        return self.no_edit is None

    @property
    def pauses(self) -> bool:
        """Whether a pass can stop there."""
        return self.no_pause is None


_HEAD = "the layers are behind it, and nothing but the choice of a token follows"
ABOUT: Mapping[Point, About] = {
    Point.EMBED: About(Axis.HIDDEN, "embeddings of tokens and positions, scaled: what the first layer takes"),
    Point.RESID_PRE: About(Axis.HIDDEN, "the residual stream that the layer takes"),
    Point.ATTN_IN: About(Axis.HIDDEN, "what attention takes: the residual stream, normed where the family does so"),
    Point.Q: About(Axis.HEADS, "queries as they are projected, before their norm and rotation"),
    Point.K: About(Axis.HEADS, "keys as they are projected, before their norm and rotation"),
    Point.V: About(Axis.HEADS, "values"),
    Point.Q_ROT: About(Axis.HEADS, "queries behind their norm and rotation"),
    Point.K_ROT: About(Axis.HEADS, "keys behind their norm and rotation: what the KV cache keeps"),
    Point.PATTERN: About(Axis.KEYS, "the share of each key in each query's attention", _NO_TENSOR, _NO_TENSOR),
    Point.Z: About(Axis.HEADS, "the values that each head has mixed, before the output projection"),
    Point.ATTN_OUT: About(Axis.HIDDEN, "what attention adds to the residual stream"),
    Point.RESID_MID: About(Axis.HIDDEN, "the residual stream between attention and feed-forward"),
    Point.MLP_IN: About(Axis.HIDDEN, "what the feed-forward takes: the residual stream, normed where the family does"),
    Point.ROUTER_LOGITS: About(Axis.EXPERTS, "the router's score of each expert, before any function of it"),
    Point.EXPERTS: About(
        Axis.EXPERTS, "the weight of each expert that the token visits, and 0 of all others; edits change those visited"
    ),
    Point.MLP_PRE: About(Axis.NEURONS, "neurons before their activation; of a gated feed-forward the gate"),
    Point.MLP_POST: About(Axis.NEURONS, "neurons before the output projection, times the gate where there is one"),
    Point.MLP_OUT: About(Axis.HIDDEN, "what the feed-forward adds to the residual stream"),
    Point.STATE: About(
        Axis.STATE,
        "what a recurrent layer remembers behind the last position of a pass",
        "a state is memory of all positions, in the layout of its layer",
        "a state is not part of the stream: pause at resid_post",
    ),
    Point.RESID_POST: About(Axis.HIDDEN, "the residual stream that the layer gives to the next"),
    Point.FINAL_NORM: About(Axis.HIDDEN, "the last residual stream behind the final norm", no_pause=_HEAD),
    Point.LOGITS: About(Axis.VOCABULARY, "the logits, scaled and capped", no_pause=_HEAD),
}

ORDER: Mapping[Point, int] = {point: order for order, point in enumerate(Point)}
WHOLE: frozenset[Point] = frozenset({Point.EMBED, Point.FINAL_NORM, Point.LOGITS})
"""Points of the model: clients name no layer. `embed` counts as one of layer 0, the others as of the last."""
STREAM: frozenset[Point] = frozenset({Point.EMBED, Point.RESID_PRE, Point.RESID_MID, Point.RESID_POST})
"""Where the residual stream itself stands."""
HEAD: frozenset[Point] = frozenset({Point.FINAL_NORM, Point.LOGITS})
"""Points behind the layers: nothing that a session keeps depends on them."""

Place = tuple[int, int]
"""Of a point in a pass: its boundary and its order."""


def place_of(boundary: int, point: Point) -> Place:
    """Where a point is in a pass."""
    return boundary, ORDER[point]


def boundary_of(point: Point, layer: int) -> int:
    """The boundary that the point belongs to. What is behind the layers has one of its own."""
    return layer + 2 if point in HEAD else layer + 1


@dataclass(frozen=True, slots=True)
class PointShape:
    """What a point is in one layer: `width` numbers at one position, divided evenly among `heads`, 1 where there are
    none. The width of a pattern is `heads`: so many numbers for each key.
    """

    width: int
    heads: int = 1


Points = Mapping[Point, tuple[PointShape | None, ...]]
"""Of a model: for each of its points what it is in each layer; None: the layer lacks it. `embed` is in the first layer
alone, what is behind the layers in the last.
"""


BETWEEN: frozenset[Point] = frozenset({Point.EMBED, Point.RESID_PRE, Point.RESID_POST})
"""Points that are no layer's inside."""


def around_layers(num_layers: int, width: int, vocab_size: int) -> Points:
    """The points that any model has: those that are not inside a layer."""
    shape, nowhere = PointShape(width), (None,) * (num_layers - 1)
    return {
        Point.EMBED: (shape, *nowhere),
        Point.RESID_PRE: (shape,) * num_layers,
        Point.RESID_POST: (shape,) * num_layers,
        Point.FINAL_NORM: (*nowhere, shape),
        Point.LOGITS: (*nowhere, PointShape(vocab_size)),
    }


ALIASES: Mapping[str, Point] = {
    "hook_embed": Point.EMBED,
    "embeddings": Point.EMBED,
    "hook_resid_pre": Point.RESID_PRE,
    "ln1.hook_normalized": Point.ATTN_IN,
    "attn.hook_q": Point.Q,
    "hook_q": Point.Q,
    "q_norm_in": Point.Q,
    "attn.hook_k": Point.K,
    "hook_k": Point.K,
    "k_norm_in": Point.K,
    "attn.hook_v": Point.V,
    "hook_v": Point.V,
    "value": Point.V,
    "attn.hook_rot_q": Point.Q_ROT,
    "hook_rot_q": Point.Q_ROT,
    "attn.hook_rot_k": Point.K_ROT,
    "hook_rot_k": Point.K_ROT,
    "attn.hook_pattern": Point.PATTERN,
    "hook_pattern": Point.PATTERN,
    "attn_probs": Point.PATTERN,
    "attn.hook_z": Point.Z,
    "hook_z": Point.Z,
    "hook_attn_out": Point.ATTN_OUT,
    "attn_out_post": Point.ATTN_OUT,
    "hook_resid_mid": Point.RESID_MID,
    "ln2.hook_normalized": Point.MLP_IN,
    "mlp.hook_router_logits": Point.ROUTER_LOGITS,
    "mlp.hook_expert_weights": Point.EXPERTS,
    "expert_weights": Point.EXPERTS,
    "mlp.hook_pre": Point.MLP_PRE,
    "hook_pre": Point.MLP_PRE,
    "mlp.hook_post": Point.MLP_POST,
    "hook_post": Point.MLP_POST,
    "mlp_act": Point.MLP_POST,
    "hook_mlp_out": Point.MLP_OUT,
    "mlp_out_post": Point.MLP_OUT,
    "hook_resid_post": Point.RESID_POST,
    "ln_final.hook_normalized": Point.FINAL_NORM,
    "lm_head": Point.LOGITS,
}
"""Other spellings: of TransformerLens, within a block, and of interp-engine."""

_IN_BLOCK = re.compile(r"blocks\.(0|[1-9][0-9]{0,5})\.(.+)")
_AT_LAYER = re.compile(r"(.+)\.(0|[1-9][0-9]{0,5})")


def find_point(name: str) -> tuple[Point, int | None] | None:
    """The point of that name or spelling, and the layer where the name has it: `blocks.3.attn.hook_q` of
    TransformerLens, `q.3` of interp-engine. None if there is no such point.
    """
    layer: int | None = None
    if found := _IN_BLOCK.fullmatch(name):
        layer, name = int(found[1]), found[2]
    elif found := _AT_LAYER.fullmatch(name):
        name, layer = found[1], int(found[2])
    point = Point(name) if name in set(Point) else ALIASES.get(name)
    if point is None or (layer is not None and point in WHOLE):
        return None
    return point, layer


def names_of(points: Iterable[Point]) -> str:
    """Their names for a message, in the order of a pass."""
    ordered: list[Point] = sorted(points, key=ORDER.__getitem__)
    return ", ".join(ordered)
