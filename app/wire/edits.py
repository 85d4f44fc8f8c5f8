"""Edits of a residual stream in request bodies. Data, never code."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationInfo, field_validator

from app.domain.breakpoints import ALL, LAST, EditOp, Positions, TensorData
from app.wire.base import MAX_COUNT, LongList, WireModel
from app.wire.tensors import norm

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


Float32 = Annotated[float, AfterValidator(_require_float32)]
WordField = Annotated[Literal["last", "all"], Tag("a word")]
RangeField = Annotated[
    LongList[Annotated[int, Field(ge=0, le=MAX_COUNT)]],
    Field(min_length=2, max_length=2),
    AfterValidator(_require_order),
    Tag("a range"),
]
PositionsField = Annotated[
    WordField | RangeField, Discriminator(lambda value: "a range" if isinstance(value, list) else "a word")
]
VectorField = Annotated[
    Annotated[VectorName, Tag("a name")] | Annotated[LongList[Float32], Tag("its numbers")],
    Discriminator(lambda value: "its numbers" if isinstance(value, list) else "a name"),
]

NEEDED_BY: dict[str, tuple[EditOp, ...]] = {
    "factor": (EditOp.SCALE, EditOp.CLAMP),
    "vector": (EditOp.ADD, EditOp.REPLACE, EditOp.PROJECT_OUT, EditOp.CLAMP),
}
TAKEN_BY: dict[str, tuple[EditOp, ...]] = {**NEEDED_BY, "factor": (EditOp.SCALE, EditOp.ADD, EditOp.CLAMP)}


class EditBody(WireModel):
    """One change at some positions. `factor` goes with scale, add (default: 1) and clamp, `vector` with add, replace,
    project_out and clamp.
    """

    op: Annotated[EditOp, Field(strict=False)]
    factor: Annotated[float, Field(ge=-MAX_FACTOR, le=MAX_FACTOR)] | None = Field(None, validate_default=True)
    vector: VectorField | None = Field(
        None, validate_default=True, description="name of an uploaded vector, or its numbers: hidden_size of them"
    )
    positions: PositionsField = Field(
        "all", description="of the session's history: [first, end], without `end`; last: the last of the context"
    )
    max_norm: Annotated[Float32, Field(gt=0)] | None = Field(
        None, description="the change is shortened to this length (L2, at each position)"
    )

    @field_validator("factor", "vector")
    @classmethod
    def _goes_with_op(cls, value: object, info: ValidationInfo) -> object:
        op, field = info.data.get("op"), info.field_name
        assert field is not None
        if op is None:  # which has an error of its own
            return value
        if value is None and op in NEEDED_BY[field]:
            raise ValueError(f"{op} needs it")
        if value is not None and op not in TAKEN_BY[field]:
            raise ValueError(f"goes with {', '.join(TAKEN_BY[field])}, not with {op}")
        return value

    def to_positions(self) -> Positions:
        """`positions` in the engine's form."""
        if isinstance(self.positions, list):
            first, end = self.positions
            return Positions(first, end)
        return LAST if self.positions == "last" else ALL


Edits = Annotated[list[EditBody], Field(min_length=1, max_length=MAX_EDITS)]


def fits(op: EditOp, vector: TensorData) -> bool:
    """Whether the vector is long enough, and not too long, for what `op` does with it."""
    return op not in ALONG_A_DIRECTION or DIRECTION_LENGTHS[0] <= norm(vector) <= DIRECTION_LENGTHS[1]
