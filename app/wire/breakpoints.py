"""Bodies about breakpoints, the edits that they make, and vectors."""

import secrets
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from typing_extensions import TypeAliasType

from app.domain.breakpoints import (
    ALL,
    LAST,
    Action,
    Breakpoint,
    Edit,
    EditOp,
    OnTimeout,
    Pass,
    Positions,
    TensorData,
    When,
)
from app.domain.errors import FieldOutOfRange
from app.domain.values import ModelInfo
from app.wire.base import MAX_COUNT, LongList, QueryModel, TextOrList, TokenId, View, WireModel, check_token_ids
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
RangeField = Annotated[
    LongList[Annotated[int, Field(ge=0, le=MAX_COUNT)]],
    Field(min_length=2, max_length=2),
    AfterValidator(_require_order),
]
PositionsField = TextOrList[Literal["last", "all"], RangeField]
VectorField = TextOrList[VectorName, LongList[Float32]]

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


DEFAULT_TIMEOUT_S = 600.0
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.1, 24 * 3600

Layer = Annotated[int, Field(ge=0, le=MAX_COUNT)]
ForwardPass = TypeAliasType(
    "ForwardPass", Annotated[Pass, Field(strict=False), WithJsonSchema({"type": "string", "enum": list(Pass)})]
)
"""`Pass` under a name that is no word of Python, which a generated client could not have."""


class WhenBody(WireModel):
    """Which positions of which passes; every condition that is given must hold."""

    in_pass: ForwardPass = Field(
        Pass.ANY, alias="pass", description="prefill: the turn's context; decode: the tokens that it generates"
    )
    position: int | None = Field(None, ge=0, le=MAX_COUNT, description="position in the session's history")
    token_id: TokenId | None = Field(None, description="only where this token stands")
    every: int | None = Field(None, ge=1, le=MAX_COUNT, description="only positions that this number divides")

    def to_when(self, info: ModelInfo) -> When:
        """The engine's form. Raises `FieldOutOfRange` for what can be in no history of this model."""
        if self.position is not None and self.position >= info.max_model_len:
            raise FieldOutOfRange(
                f"when.position: {self.position} must be from 0 to {info.max_model_len - 1}", param="when.position"
            )
        if self.token_id is not None:
            check_token_ids([self.token_id], info.vocab_size, param="when.token_id")
        return When(self.in_pass, self.position, self.token_id, self.every)


EVERYWHERE = WhenBody()


class BreakpointBody(WireModel):
    """Something to do after some layers. Exactly one of `layer` and `layers` says which, counted from 0."""

    layer: Layer | None = None
    layers: LongList[Layer] | None = Field(None, min_length=1)
    when: WhenBody = EVERYWHERE
    action: Annotated[Action, Field(strict=False)]
    edits: Edits | None = Field(None, validate_default=True, description="goes with action edit, which needs them")
    once: bool = Field(False, description="the breakpoint goes after it has acted for the first time")
    timeout_s: float | None = Field(
        None,
        ge=MIN_TIMEOUT_S,
        le=MAX_TIMEOUT_S,
        description="how long a pause may last (default: 600); goes with action pause",
    )
    on_timeout: Annotated[OnTimeout, Field(strict=False)] | None = Field(
        None, description="what becomes of the turn then (default: resume); goes with action pause"
    )

    @field_validator("edits")
    @classmethod
    def _only_edit_edits(cls, value: object, info: ValidationInfo) -> object:
        action = info.data.get("action")
        if value is None and action is Action.EDIT:
            raise ValueError(f"action edit needs 1 to {MAX_EDITS} of them")
        if value is not None and action not in (None, Action.EDIT):
            raise ValueError(f"goes with action edit, not with {action}")
        return value

    @field_validator("timeout_s", "on_timeout")
    @classmethod
    def _only_pauses_time_out(cls, value: object, info: ValidationInfo) -> object:
        action = info.data.get("action")
        if value is not None and action not in (None, Action.PAUSE):
            raise ValueError(f"goes with action pause, not with {action}")
        return value

    @model_validator(mode="after")
    def _one_kind_of_layers(self) -> Self:
        if (self.layer is None) == (self.layers is None):
            given = "none" if self.layer is None else "both"
            raise FieldOutOfRange(f"give exactly one of layer and layers, not {given}", param="layer")
        return self

    def to_breakpoint(self, info: ModelInfo, edits: tuple[Edit, ...]) -> Breakpoint:
        """A new breakpoint with `edits`, which are the body's. Raises `FieldOutOfRange` for what the model has not."""
        return Breakpoint(
            id=f"bp_{secrets.token_hex(8)}",
            layers=self._layers(info.num_layers),
            action=self.action,
            when=self.when.to_when(info),
            edits=edits,
            once=self.once,
            timeout_s=DEFAULT_TIMEOUT_S if self.timeout_s is None else self.timeout_s,
            on_timeout=OnTimeout.RESUME if self.on_timeout is None else self.on_timeout,
        )

    def _layers(self, num_layers: int) -> tuple[int, ...]:
        if self.layer is not None:
            _check_layer(self.layer, num_layers, param="layer")
            return (self.layer,)
        assert self.layers is not None
        for index, layer in enumerate(self.layers):
            _check_layer(layer, num_layers, param=f"layers.{index}")
            if layer in self.layers[:index]:
                raise FieldOutOfRange(f"layers.{index}: {layer} is given twice", param=f"layers.{index}")
        return tuple(sorted(self.layers))


def _check_layer(layer: int, num_layers: int, *, param: str) -> None:
    if layer >= num_layers:
        raise FieldOutOfRange(f"{param}: {layer} must be from 0 to {num_layers - 1}", param=param)


class WhenView(View):
    """Which positions of which passes. Conditions that are null hold everywhere."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    in_pass: ForwardPass = Field(alias="pass")
    position: int | None
    token_id: int | None
    every: int | None


class EditVectorView(BaseModel):
    """The vector of an edit, as it was when the edit was sent: its length in numbers, and its L2 length."""

    size: int
    norm: float


class EditView(BaseModel):
    """One change. Fields that do not go with `op` are null."""

    op: EditOp
    factor: float | None
    vector: EditVectorView | None
    positions: Literal["last", "all"] | list[int]
    max_norm: float | None

    @classmethod
    def of(cls, edit: Edit) -> Self:
        """The wire form of `edit`, which is one of a breakpoint's."""
        vector = edit.vector and EditVectorView(size=edit.vector.shape[0], norm=norm(edit.vector))
        first, end = edit.positions.first, edit.positions.end
        return cls(
            op=edit.op,
            factor=edit.factor if edit.op in TAKEN_BY["factor"] else None,
            vector=vector,
            positions=[first, end] if end is not None else "last" if edit.positions == LAST else "all",
            max_norm=edit.max_norm,
        )


class BreakpointView(View):
    """An armed breakpoint. `timeout_s` and `on_timeout` are for the pauses of one that pauses."""

    id: str
    layers: list[int]
    action: Action
    when: WhenView
    edits: list[Annotated[EditView, BeforeValidator(EditView.of)]]
    once: bool
    timeout_s: float
    on_timeout: OnTimeout


class BreakpointList(BaseModel):
    """A session's breakpoints in the order in which they were armed, which is the order in which they act."""

    data: list[BreakpointView]


class VectorQuery(QueryModel):
    """What to call a vector."""

    name: str = Field(pattern=VECTOR_NAME)


class VectorView(BaseModel):
    """A named vector of `size` numbers; `norm` is its L2 length."""

    name: str
    size: int
    dtype: str
    norm: float

    @classmethod
    def of(cls, name: str, vector: TensorData) -> Self:
        """What there is to know of it without its numbers."""
        return cls(name=name, size=vector.shape[0], dtype=vector.dtype, norm=norm(vector))


class VectorList(BaseModel):
    """The caller's vectors by name."""

    data: list[VectorView]
