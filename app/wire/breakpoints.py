"""Bodies about breakpoints and vectors."""

import secrets
from typing import Annotated, Self

from pydantic import (
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
    Action,
    Breakpoint,
    Edit,
    Gate,
    OnTimeout,
    Pass,
    Probe,
    TensorData,
    TopFeatures,
    When,
)
from app.domain.errors import FieldOutOfRange
from app.domain.points import Point
from app.domain.values import ModelInfo
from app.wire.base import MAX_COUNT, LongList, QueryModel, TokenId, View, WireModel, check_token_ids, list_shape
from app.wire.edits import MAX_EDITS, VECTOR_NAME, Edits, EditView, GateView, Numbers, ValueFields, VectorName
from app.wire.points import Layer, PointName, Target, check_action, check_heads, find_target
from app.wire.probes import ProbeBody, ProbeView
from app.wire.tensors import norm

DEFAULT_TIMEOUT_S = 600.0
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.1, 24 * 3600

ForwardPass = TypeAliasType(
    "ForwardPass", Annotated[Pass, Field(strict=False), WithJsonSchema({"type": "string", "enum": list(Pass)})]
)
"""`Pass` under a name that is no word of Python, which a generated client could not have."""


class WhenBody(ValueFields):
    """Which positions of which passes; every condition that is given must hold. One on a value, which actions pause and
    capture take, is for the layer and the point of its feature or probe.
    """

    in_pass: ForwardPass = Field(
        Pass.ANY, alias="pass", description="prefill: the turn's context; decode: the tokens that it generates"
    )
    position: int | None = Field(None, ge=0, le=MAX_COUNT, description="position in the session's history")
    token_id: TokenId | None = Field(None, description="only where this token stands")
    every: int | None = Field(None, ge=1, le=MAX_COUNT, description="only positions that this number divides")

    @model_validator(mode="after")
    def _whole_value(self) -> Self:
        if self.value_field is not None:
            self.check_value()
        return self

    @property
    def value_field(self) -> str | None:
        """The first field of a condition on a value, if there is one."""
        return next((name for name in ValueFields.model_fields if getattr(self, name) is not None), None)

    def to_when(self, info: ModelInfo) -> When:
        """The engine's form. Raises `FieldOutOfRange` for what can be in no history of this model."""
        if self.position is not None and self.position >= info.max_model_len:
            raise FieldOutOfRange.at("when.position", f"{self.position} must be from 0 to {info.max_model_len - 1}")
        if self.token_id is not None:
            check_token_ids([self.token_id], info.vocab_size, param="when.token_id")
        return When(self.in_pass, self.position, self.token_id, self.every)


EVERYWHERE = WhenBody()


MAX_TOP_K = 32


class TopFeaturesBody(WireModel):
    """Which dictionary is read at each position, and how many features are told."""

    dictionary: VectorName
    top_k: int = Field(10, ge=1, le=MAX_TOP_K, description="the most active features, as far as they are active")


class BreakpointBody(WireModel):
    """Something to do at a point of some layers. Exactly one of `layer` and `layers` says which, counted from 0, unless
    the point is of the model or its name has the layer.
    """

    point: PointName = Field(
        Point.RESID_POST.value,
        description="where in the layer, as `/v1/points` lists them; `blocks.3.attn.hook_q` names the layer as well",
    )
    layer: Layer | None = None
    layers: LongList[Layer] | None = Field(None, min_length=1)
    heads: Numbers | None = Field(None, description="only these heads are captured; goes with action capture")
    when: WhenBody = EVERYWHERE
    action: Annotated[Action, Field(strict=False)]
    edits: Edits | None = Field(None, validate_default=True, description="goes with action edit, which needs them")
    probe: ProbeBody | None = Field(
        None, validate_default=True, description="goes with action probe, which needs it; it has its layer and point"
    )
    features: TopFeaturesBody | None = Field(
        None,
        validate_default=True,
        description="goes with action features, which needs it; the dictionary has its layer and point",
    )
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

    @field_validator("edits", "probe", "features")
    @classmethod
    def _goes_with_its_action(cls, value: object, info: ValidationInfo) -> object:
        action, own = info.data.get("action"), {"edits": Action.EDIT}.get(info.field_name or "", info.field_name)
        if value is None and action == own:
            raise ValueError(f"action {own} needs " + (f"1 to {MAX_EDITS} of them" if own == Action.EDIT else "it"))
        if value is not None and action not in (None, own):
            raise ValueError(f"goes with action {own}, not with {action}")
        return value

    @field_validator("timeout_s", "on_timeout")
    @classmethod
    def _only_pauses_time_out(cls, value: object, info: ValidationInfo) -> object:
        action = info.data.get("action")
        if value is not None and action not in (None, Action.PAUSE, Action.PROBE):
            raise ValueError(f"goes with action pause or probe, not with {action}")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        given = next((name for name in ("point", "layer", "layers") if name in self.model_fields_set), None)
        if self.action in (Action.PROBE, Action.FEATURES) and given is not None:
            owner = "probe" if self.action is Action.PROBE else "dictionary"
            raise FieldOutOfRange.at(given, f"the {owner} has its own")
        is_edit = self.action is Action.EDIT
        if (field := self.when.value_field) is not None and self.action not in (Action.PAUSE, Action.CAPTURE):
            own = "; an edit has its own when" if is_edit else ""
            raise FieldOutOfRange.at(
                f"when.{field}", f"goes with actions pause and capture, not with {self.action}{own}"
            )
        if self.heads is not None and self.action is not Action.CAPTURE:
            where = "; an edit has its own" if is_edit else ""
            raise FieldOutOfRange.at("heads", f"goes with action capture, not with {self.action}{where}")
        if self.layer is not None and self.layers is not None:
            raise FieldOutOfRange("give exactly one of layer and layers, not both", param="layer")
        return self

    def to_target(self, info: ModelInfo) -> Target:
        """Where it acts. Raises `FieldOutOfRange` for what the model does not have, or what cannot be done there."""
        layers = {} if self.layer is None else {"layer": self.layer}
        layers |= {f"layers.{index}": layer for index, layer in enumerate(self.layers or ())}
        target = find_target(info, self.point, layers)
        check_action(self.action, target.point)
        if self.heads is not None:
            check_heads(tuple(self.heads), target)
        return target

    def to_breakpoint(
        self,
        info: ModelInfo,
        target: Target,
        edits: tuple[Edit, ...],
        probe: Probe | None = None,
        features: TopFeatures | None = None,
        gate: Gate | None = None,
    ) -> Breakpoint:
        """A new breakpoint at the target, with what the body names. Raises `FieldOutOfRange` for what can be in no
        history of this model.
        """
        return Breakpoint(
            id=f"bp_{secrets.token_hex(8)}",
            layers=target.layers,
            action=self.action,
            when=self.when.to_when(info),
            edits=edits,
            once=self.once,
            timeout_s=DEFAULT_TIMEOUT_S if self.timeout_s is None else self.timeout_s,
            on_timeout=OnTimeout.RESUME if self.on_timeout is None else self.on_timeout,
            point=target.point,
            heads=tuple(self.heads or ()),
            probe=probe,
            features=features,
            gate=gate,
        )


class WhenView(View):
    """Which positions of which passes. Conditions that are null hold everywhere."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    in_pass: ForwardPass = Field(alias="pass")
    position: int | None
    token_id: int | None
    every: int | None


class TopFeaturesView(View):
    """Which dictionary is read, as it was when the breakpoint was armed."""

    dictionary: str = Field(validation_alias="name")
    top_k: int


class BreakpointView(View):
    """An armed breakpoint. `timeout_s` and `on_timeout` are for the pauses of one that pauses."""

    id: str
    point: Point
    layers: list[int]
    heads: list[int] = Field(description="which are captured; empty: all that the point has")
    action: Action
    when: WhenView
    edits: list[Annotated[EditView, BeforeValidator(EditView.of)]]
    probe: ProbeView | None
    features: TopFeaturesView | None
    gate: GateView | None = Field(description="the condition on a value that `when` had; null: there was none")
    once: bool
    timeout_s: float
    on_timeout: OnTimeout


BreakpointList = list_shape(
    "BreakpointList",
    "A session's breakpoints in the order in which they were armed, which is the order in which they act.",
    BreakpointView,
)


class CapturesQuery(QueryModel):
    """Which captures."""

    point: PointName | None = Field(None, description="only those of this point")
    layer: Layer | None = Field(None, description="only those of this layer")


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


VectorList = list_shape("VectorList", "The caller's vectors by name.", VectorView)
