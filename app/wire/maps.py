"""Bodies about maps of what a session keeps inside the model, over layers and positions."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from app.domain.activations import (
    MAX_MAP_POSITIONS,
    ActivationMap,
    ActivationNorms,
    Attribution,
    LensAsk,
    LensKind,
    LensRows,
    MapLayer,
    Translators,
)
from app.domain.errors import FieldOutOfRange
from app.domain.points import Point
from app.text.tokenizer import Tokens
from app.wire.base import check_token_ids
from app.wire.checkpoint import RANGE, ActivationQuery, PositionsText
from app.wire.edits import VECTOR_NAME
from app.wire.turns import finite

T = TypeVar("T")

LIST = re.compile(r"\d{1,9}(,\d{1,9}){0,511}", re.ASCII)
DIGITS = 4
"""Of a log-probability behind the point: 64 positions of 30 layers take 50 kB."""


def _require_layers(text: str) -> str:
    found = RANGE.fullmatch(text)
    if LIST.fullmatch(text) is None and (found is None or int(found[1]) >= int(found[2])):
        raise ValueError("layers such as 3,7,11, or first:end with first lower than end, which is not included")
    return text


MAX_TOKENS = 16
"""Chosen ones of a lens."""
TokensText = Annotated[str, Field(pattern=r"^[0-9]{1,9}(,[0-9]{1,9}){0,63}$")]
LayersText = Annotated[str, AfterValidator(_require_layers)]


class MapQuery(ActivationQuery):
    """Which residual streams."""

    positions: PositionsText = Field(
        "last",
        description="last: the last position that is kept; all: all that are; first:end, positions in the session's "
        f"history; at most {MAX_MAP_POSITIONS}",
    )
    layers: LayersText | None = Field(None, description="such as 3,7,11 or first:end; absent: all")

    def to_layers(self, num_layers: int) -> tuple[int, ...] | None:
        """The layers, in order; None: all. Raises `FieldOutOfRange` for one that the model does not have."""
        if self.layers is None:
            return None
        first, colon, end = self.layers.partition(":")
        last = int(end) - 1 if colon else max(map(int, self.layers.split(",")))
        if last >= num_layers:
            raise FieldOutOfRange.at("layers", f"{last} must be from 0 to {num_layers - 1}")
        return tuple(range(int(first), last + 1)) if colon else tuple(sorted(set(map(int, self.layers.split(",")))))


class LensMapQuery(MapQuery):
    """Which residual streams the lens reads, and how much it tells."""

    top_k: int = Field(1, ge=1, le=5, description="tokens to report for each residual stream")
    lens: str | None = Field(
        None, pattern=VECTOR_NAME, description="name of an uploaded lens, whose layers, and the last, are read"
    )
    tokens: TokensText | None = Field(
        None, description=f"ids such as 262,257: at most {MAX_TOKENS} whose ranks and log-probabilities to report too"
    )
    measures: bool = Field(False, description="report entropies, and divergences from what the model says at last")
    beside: str | None = Field(
        None, max_length=100, description="id of another session, to report how the lens differs from it at each place"
    )

    def to_ask(self, lens: Translators | None, vocab_size: int) -> LensAsk:
        """What to tell, in the engine's form. Raises `FieldOutOfRange` for tokens that there are not."""
        chosen = () if self.tokens is None else tuple(map(int, self.tokens.split(",")))
        if len(chosen) > MAX_TOKENS:
            raise FieldOutOfRange.at("tokens", f"at most {MAX_TOKENS}, not {len(chosen)}")
        check_token_ids(chosen, vocab_size, param="tokens")
        if lens is None:
            return LensAsk(self.top_k, chosen=chosen, measures=self.measures)
        return LensAsk(self.top_k, lens.file.digest, lens.lens is LensKind.TUNED, chosen, self.measures)

    def to_lens_layers(self, lens: Translators | None, num_layers: int) -> tuple[int, ...] | None:
        """The layers that the lens reads, or those asked for. Raises `FieldOutOfRange` for one that it lacks."""
        layers = self.to_layers(num_layers)
        if lens is None:
            return layers
        readable = {*lens.layers, num_layers - 1}
        for layer in layers or ():
            if layer not in readable:
                known = ", ".join(map(str, sorted(readable)))
                raise FieldOutOfRange.at("layers", f"the lens has no matrix for {layer}, only {known}")
        return layers or tuple(sorted(readable))


class NormsQuery(MapQuery):
    """Which residual streams to measure, and against what."""

    vector: str | None = Field(None, pattern=VECTOR_NAME, description="name of a vector to compare each with")


class MapView(BaseModel):
    """A map over positions `[first, end)` of the history, where `token_ids` stand.

    `[kept_first, kept_end)` are all positions for which the server keeps a residual stream after one of the layers.
    """

    model_config = ConfigDict(frozen=True)

    first: int
    end: int
    kept_first: int
    kept_end: int
    token_ids: list[int]


class LensMapLayer(BaseModel):
    """The lens after one layer, with a list for each position, best first: empty where nothing is kept."""

    layer: int
    token_ids: list[list[int]]
    logprobs: list[list[float | None]] = Field(
        description="natural logarithms, to 4 digits; null where the residual stream is not finite"
    )
    ranks: list[list[int]] = Field(description="of the chosen `tokens`, in their order: 0 is the likeliest of all")
    chosen_logprobs: list[list[float | None]] = Field(description="of the chosen `tokens`")
    entropies: list[float | None] = Field(description="in nats; empty unless `measures` were asked for")
    divergences: list[float | None] = Field(
        description="from what the model says at last, KL(last || here), in nats; null where the stream after the last "
        "layer is not kept; empty unless `measures` were asked for"
    )
    beside_divergences: list[float | None] = Field(
        description="from what the lens says of the session `beside` it, KL(here || there), in nats; null where that "
        "keeps nothing; empty unless one was named"
    )
    changed_token_ids: list[list[int]] = Field(
        description="the `top_k` tokens whose probability differs most from the session `beside` it, most first"
    )
    changes: list[list[float | None]] = Field(description="what their probabilities are more here, to 4 digits")


class LensMapView(MapView):
    """The logit lens as a map: what the model would say if the layers above were skipped.

    `texts` has the text of each token in the answer, by its id.
    """

    layers: list[LensMapLayer]
    texts: dict[str, str]

    @classmethod
    def of(cls, found: ActivationMap, told: LensRows, tokens: Tokens) -> Self:
        """The wire form of a map and what the lens `told` of it."""
        layers, begin = [], 0
        for each in found.layers:
            its = slice(begin, begin + len(each.positions))
            begin += len(each.positions)
            rows = _by_position(found, each, told.rows[its], ())
            chosen = _by_position(found, each, told.chosen[its], ())
            measures = _by_position(found, each, told.measures[its], (math.nan, math.nan)) if told.measures else []
            others = _by_position(found, each, told.others[its], (math.nan, ())) if told.others else []
            ids = [[token_id for token_id, _ in top] for top in rows]
            logprobs = [[_rounded(logprob) for _, logprob in top] for top in rows]
            layers.append(
                LensMapLayer(
                    layer=each.layer,
                    token_ids=ids,
                    logprobs=logprobs,
                    ranks=[[rank for rank, _ in row] for row in chosen],
                    chosen_logprobs=[[_rounded(logprob) for _, logprob in row] for row in chosen],
                    entropies=[_rounded(entropy) for entropy, _ in measures],
                    divergences=[_rounded(divergence) for _, divergence in measures],
                    beside_divergences=[_rounded(divergence) for divergence, _ in others],
                    changed_token_ids=[[token_id for token_id, _ in top] for _, top in others],
                    changes=[[_rounded(change) for _, change in top] for _, top in others],
                )
            )
        shown = (top for each in layers for top in (*each.token_ids, *each.changed_token_ids))
        named = {token_id for top in shown for token_id in top}
        texts = {str(token_id): tokens.token_text(token_id) for token_id in sorted(named.union(found.token_ids))}
        return cls(**asdict(replace(found, layers=())) | {"layers": layers}, texts=texts)


class NormsLayer(BaseModel):
    """The residual streams after one layer, with a number for each position: null where nothing is kept."""

    layer: int
    norms: list[float | None] = Field(description="L2 length; null also where it is not finite")
    cosines: list[float | None] | None = Field(description="to the vector; null where there is no direction")


class NormsView(MapView):
    """How long residual streams are, and how they lie to a vector."""

    layers: list[NormsLayer]

    @classmethod
    def of(cls, found: ActivationNorms) -> Self:
        """The wire form of `found`."""
        layers = []
        for index, each in enumerate(found.map.layers):
            norms = _by_position(found.map, each, list(map(finite, found.norms[index])), None)
            cosines = found.cosines and _by_position(found.map, each, list(map(finite, found.cosines[index])), None)
            layers.append(NormsLayer(layer=each.layer, norms=norms, cosines=cosines))
        return cls(**asdict(replace(found.map, layers=())) | {"layers": layers})


def _by_position(found: ActivationMap, layer: MapLayer, values: Sequence[T], gap: T) -> list[T]:
    by_position = dict(zip(layer.positions, values, strict=True))
    return [by_position.get(position, gap) for position in range(found.first, found.end)]


def _rounded(logprob: float) -> float | None:
    return round(logprob, DIGITS) if math.isfinite(logprob) else None


class AttributionQuery(ActivationQuery):
    """At which position, and of which tokens."""

    positions: PositionsText = Field("last", description="last: the last one that is kept; or first:end, one position")
    tokens: str = Field(
        pattern=r"^[0-9]{1,9},[0-9]{1,9}$", description="two ids: the first one's logit less the second's"
    )

    neurons: int = Field(10, ge=0, le=100, description="to report of each layer where `mlp_post` is kept, of 2048")

    def to_tokens(self, vocab_size: int) -> tuple[int, int]:
        """The ids. Raises `FieldOutOfRange` for one that there is not."""
        first, second = map(int, self.tokens.split(","))
        check_token_ids((first, second), vocab_size, param="tokens")
        return first, second


class AttributionPart(BaseModel):
    """What attention, a feed-forward or a stretch of layers adds to the difference. At `resid_post` of a layer it is
    all that the stream has gained since the last layer before that is kept: for the first one, since the beginning.
    """

    layer: int
    point: Point
    value: float | None


class AttributionUnit(BaseModel):
    """What a head, or a neuron, adds to the difference, by its number."""

    index: int
    value: float | None


class AttributionUnits(BaseModel):
    """The heads of a layer, at `z`, or at `mlp_post` its neurons of the largest values, those first. All heads add up
    to what `attn_out` adds, but for its bias.
    """

    layer: int
    point: Point
    units: list[AttributionUnit]


class AttributionView(BaseModel):
    """The difference of two tokens' logits at a position, `total`, and what parts add to it. Those at `resid_post` add
    up to it, but for what the final norm and the head add to any stream. `units` are for each layer where `z` or
    `mlp_post` is kept.
    """

    position: int
    tokens: list[int]
    total: float | None
    parts: list[AttributionPart]
    units: list[AttributionUnits]

    @classmethod
    def of(cls, found: Attribution, tokens: tuple[int, int]) -> Self:
        """The wire form of `found`."""
        parts = [AttributionPart(layer=k, point=point, value=finite(value)) for k, point, value in found.parts]
        units = [
            AttributionUnits(
                layer=layer,
                point=point,
                units=[AttributionUnit(index=index, value=finite(value)) for index, value in each],
            )
            for layer, point, each in found.units
        ]
        return cls(position=found.position, tokens=list(tokens), total=finite(found.total), parts=parts, units=units)
