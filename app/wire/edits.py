"""Bodies about edits: what is changed at a point, by what, at which positions, and where that holds."""

from dataclasses import asdict
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from app.domain.breakpoints import ALL, LAST, Edit, EditOp, Feature, PartKind, Positions, TensorData
from app.domain.points import Point
from app.wire.base import MAX_COUNT, LongList, TextOrList, View, WireModel
from app.wire.points import Layer, PointName
from app.wire.tensors import norm, to_float32, vector_of

MAX_EDITS = 16
MAX_FLOAT32 = 3.4028234663852886e38
MAX_FACTOR = 10**6
"""Far beyond it a factor alone makes the squares that a norm sums overflow float32: the layers above see zeros, and no
error tells."""
ALONG_A_DIRECTION = (EditOp.PROJECT_OUT, EditOp.CLAMP)
DIRECTION_LENGTHS = (1e-18, 1e18)
"""Of vectors whose direction counts: the square of anything in between is a float32 number other than 0."""
VECTOR_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$"

VectorName = Annotated[str, Field(pattern=VECTOR_NAME)]


def _require_float32(number: float) -> float:
    if abs(number) > MAX_FLOAT32:
        raise ValueError(f"a number from {-MAX_FLOAT32} to {MAX_FLOAT32}, the range of float32")
    return number


def _require_order(ends: list[int]) -> list[int]:
    if ends[0] >= ends[1]:
        raise ValueError("the first position must be lower than the end, which is not part of the range")
    return ends


def _require_rising(numbers: list[int]) -> list[int]:
    if any(later <= before for before, later in pairwise(numbers)):
        raise ValueError("the numbers must rise, each given once")
    return numbers


Float32 = Annotated[float, AfterValidator(_require_float32)]
RangeField = Annotated[
    LongList[Annotated[int, Field(ge=0, le=MAX_COUNT)]],
    Field(min_length=2, max_length=2),
    AfterValidator(_require_order),
]
PositionsField = TextOrList[Literal["last", "all"], RangeField]
VectorField = TextOrList[VectorName, LongList[Float32]]
Numbers = Annotated[
    LongList[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(min_length=1), AfterValidator(_require_rising)
]
"""Of heads, neurons or experts, counted from 0."""

_WITH_VECTOR = (EditOp.ADD, EditOp.REPLACE, EditOp.PROJECT_OUT, EditOp.CLAMP)
NEEDED_BY: dict[str, tuple[EditOp, ...]] = {"factor": (EditOp.SCALE, EditOp.CLAMP), "vector": _WITH_VECTOR}
TAKEN_BY: dict[str, tuple[EditOp, ...]] = {
    "factor": (EditOp.SCALE, EditOp.ADD, EditOp.CLAMP),
    "source": (EditOp.ADD, EditOp.REPLACE, EditOp.ABLATE),
    "feature": (EditOp.SCALE, EditOp.ADD, EditOp.CLAMP, EditOp.ABLATE),
    "vector": (*_WITH_VECTOR, EditOp.ABLATE),
    "orthogonal_to": (EditOp.ADD, EditOp.PROJECT_OUT, EditOp.CLAMP),
}


def to_positions(positions: str | list[int]) -> Positions:
    """A `PositionsField` in the engine's form."""
    if isinstance(positions, list):
        first, end = positions
        return Positions(first, end)
    return LAST if positions == "last" else ALL


class KeptBody(WireModel):
    """What another session, or this one, keeps of a point: its newest captures of all heads there, and its checkpoint
    if it is paused there. It is copied when the edit arrives.
    """

    session: str = Field(max_length=100)
    point: PointName | None = Field(None, description="absent: the point of the edit")
    layer: Layer | None = Field(None, description="absent: the layer of the edit")
    positions: PositionsField = Field(
        "all", description="of that session's history: [first, end], without `end`; all or the last of those kept"
    )


class FeatureBody(WireModel):
    """A feature of an uploaded dictionary."""

    dictionary: VectorName
    index: int = Field(ge=0, le=MAX_COUNT)


class ValueFields(WireModel):
    """A value at each position: `h . along`, the activation of a `feature`, or what a `probe` finds. It is `above` a
    number, `below` one, or between the two. `h` is all that stands at the position.
    """

    along: VectorField | None = Field(
        None, description="name of an uploaded vector, or its numbers: as many as the point is wide"
    )
    feature: FeatureBody | None = Field(None, description="of a dictionary at the same point; in the place of `along`")
    probe: VectorName | None = Field(None, description="name of a probe of the same point; in the place of `along`")
    above: Float32 | None = None
    below: Float32 | None = None

    def check_value(self) -> None:
        """Raise `ValueError` unless there is one value, and one end at least that leaves numbers."""
        if sum(each is not None for each in (self.along, self.feature, self.probe)) != 1:
            raise ValueError("give exactly one of along, feature and probe")
        if self.above is None and self.below is None:
            raise ValueError("give above, below or both")
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ValueError("above must be lower than below: no number is between them")


class GateBody(ValueFields):
    """At which positions the edit is made. `h` is what stands there before this edit, whichever heads or neurons it is
    for.
    """

    @model_validator(mode="after")
    def _one_value(self) -> Self:
        self.check_value()
        return self


class EditBody(WireModel):
    """One change at some positions. `factor` goes with scale, add (default: 1) and clamp; `vector` with add, replace,
    project_out and clamp, and with ablate, which without it makes zeros. `from` takes the place of `vector` in add,
    replace and ablate.
    """

    op: Annotated[EditOp, Field(strict=False)]
    factor: Annotated[float, Field(ge=-MAX_FACTOR, le=MAX_FACTOR)] | None = Field(None, validate_default=True)
    source: KeptBody | None = Field(
        None,
        alias="from",
        description="a session's kept activations: each position is given its own, ablate the mean over all of them",
    )
    feature: FeatureBody | None = Field(
        None,
        description="scale, clamp or ablate its activation, and change h by what its decoder makes of that; add: its "
        "decoder takes the place of `vector`",
    )
    vector: VectorField | None = Field(
        None,
        validate_default=True,
        description="name of an uploaded vector, or its numbers: as many as the point is wide; with heads also those "
        "of one head, which serve each; with neurons or experts also one for each",
    )
    orthogonal_to: VectorField | None = Field(
        None, description="the part of `vector` along this one is left out; it has as many numbers"
    )
    heads: Numbers | None = Field(None, description="only these heads, each on its own, of a point that has heads")
    neurons: Numbers | None = Field(None, description="only these neurons, of mlp_pre or mlp_post")
    experts: Numbers | None = Field(None, description="only these experts, of router_logits or experts")
    positions: PositionsField = Field(
        "all", description="of the session's history: [first, end], without `end`; last: the last of the context"
    )
    keep_norm: bool = Field(False, description="what comes out is brought to the length that was there (L2)")
    max_norm: Annotated[Float32, Field(gt=0)] | None = Field(
        None, description="the change is shortened to this length (L2, at each position and head)"
    )
    when: GateBody | None = Field(None, description="only where this holds")

    @field_validator("factor", "source", "feature", "vector", "orthogonal_to")
    @classmethod
    def _goes_with_op(cls, value: object, info: ValidationInfo) -> object:
        op, field = info.data.get("op"), info.field_name
        assert field is not None
        if op is None:  # which has an error of its own
            return value
        other = next((name for name in ("source", "feature") if info.data.get(name) is not None), None)
        has_source = other is not None
        if value is None and op in NEEDED_BY.get(field, ()) and not (field == "vector" and has_source):
            raise ValueError(f"{op} needs it")
        if value is not None and op not in TAKEN_BY[field]:
            raise ValueError(f"goes with {', '.join(TAKEN_BY[field])}, not with {op}")
        if value is not None and has_source and field in ("feature", "vector", "orthogonal_to"):
            raise ValueError(f"goes without {'from' if other == 'source' else other}")
        return value

    @field_validator("neurons", "experts")
    @classmethod
    def _one_kind_of_part(cls, value: object, info: ValidationInfo) -> object:
        other = next((kind for kind in PartKind if kind != info.field_name and info.data.get(kind)), None)
        if value is not None and other is not None:
            raise ValueError(f"goes without {other}")
        return value

    @field_validator("max_norm")
    @classmethod
    def _one_kind_of_length(cls, value: object, info: ValidationInfo) -> object:
        if value is not None and info.data.get("keep_norm"):
            raise ValueError("goes without keep_norm, which it would undo")
        return value

    @property
    def part(self) -> tuple[PartKind, tuple[int, ...]] | None:
        """What alone is changed."""
        return next(((kind, tuple(found)) for kind in PartKind if (found := getattr(self, kind)) is not None), None)


Edits = Annotated[list[EditBody], Field(min_length=1, max_length=MAX_EDITS)]


def fits(edit: Edit, width: int) -> bool:
    """Whether what the edit uses of its vector, at a point of that width, is long enough, and not too long, for what it
    does with it: each head's numbers, where it has those of all.
    """
    if edit.op not in ALONG_A_DIRECTION or edit.vector is None or edit.feature is not None:
        return True
    numbers, part = to_float32(edit.vector).reshape(1, -1), edit.part
    if part is not None and numbers.size == width:
        in_heads = part.kind is PartKind.HEADS
        numbers = (numbers.reshape(part.of, -1) if in_heads else numbers.T)[list(part.chosen)]
        numbers = numbers if in_heads else numbers.T
    shortest, longest = DIRECTION_LENGTHS
    return all(shortest <= norm(vector_of(each)) <= longest for each in numbers)


class EditVectorView(BaseModel):
    """The vector of an edit, as it was when the edit was sent: its length in numbers, and its L2 length. With `rows`
    each position has one of its own, and `norm` is that of all.
    """

    size: int
    norm: float
    rows: int | None = None

    @classmethod
    def of(cls, vector: TensorData) -> Self:
        """What there is to know of it without its numbers."""
        rows = vector.shape[0] if len(vector.shape) == 2 else None
        return cls(size=vector.shape[-1], norm=norm(vector), rows=rows)


class FeatureView(BaseModel):
    """How a feature's activation follows from `z`, the product with its encoder: `relu(scale * z + bias)` where `z +
    gate > threshold`, else 0. The encoder and the decoder are the parts of `vector`.
    """

    scale: float
    bias: float
    gate: float
    threshold: float
    k: int | None = Field(description="of TopK: it is 0 unless the feature is among so many, the most active ones")
    reads: Point | None = Field(description="of a transcoder: the point that it reads; null: the one that is changed")

    @classmethod
    def of(cls, found: Feature | None) -> Self | None:
        """The wire form; None: there is none."""
        if found is None:
            return None
        return cls(**asdict(found), k=None if found.of_topk is None else found.of_topk.k)


class GateView(View):
    """Where something is done. An end that is null does not count. Of a feature or a probe `along` has its weights, and
    the ends are those of the number before its last function.
    """

    along: Annotated[EditVectorView, BeforeValidator(EditVectorView.of)]
    above: float | None
    below: float | None


class EditView(BaseModel):
    """One change. Fields that do not go with `op` are null, and so are `heads`, `neurons` and `experts` where all are
    changed.
    """

    op: EditOp
    factor: float | None
    vector: EditVectorView | None
    feature: FeatureView | None
    heads: list[int] | None
    neurons: list[int] | None
    experts: list[int] | None
    positions: Literal["last", "all"] | list[int]
    keep_norm: bool
    max_norm: float | None
    when: GateView | None

    @classmethod
    def of(cls, edit: Edit) -> Self:
        """The wire form of `edit`, which is one of a breakpoint's."""
        first, end = edit.positions.first, edit.positions.end
        part = {kind.value: None for kind in PartKind} | (
            {edit.part.kind.value: list(edit.part.chosen)} if edit.part else {}
        )
        return cls(
            op=edit.op,
            factor=edit.factor if edit.op in TAKEN_BY["factor"] else None,
            vector=edit.vector and EditVectorView.of(edit.vector),
            feature=FeatureView.of(edit.feature),
            **part,
            positions=[first, end] if end is not None else "last" if edit.positions == LAST else "all",
            keep_norm=edit.keep_norm,
            max_norm=edit.max_norm,
            when=edit.gate,
        )
