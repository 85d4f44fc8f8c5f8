"""Points of the model in requests, and what clients are told of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, Field

from app.domain.breakpoints import Action, PartKind
from app.domain.errors import FieldOutOfRange
from app.domain.points import ABOUT, ALIASES, WHOLE, Axis, Point, Points, PointShape, find_point, names_of
from app.domain.values import ModelInfo
from app.wire.base import MAX_COUNT

PARTS = {PartKind.HEADS: (Axis.HEADS,), PartKind.NEURONS: (Axis.NEURONS,), PartKind.EXPERTS: (Axis.EXPERTS,)}
"""What a part is chosen from."""


def _require_point(name: str) -> str:
    if find_point(name) is None:
        raise ValueError(f"no such point: there are {names_of(Point)}")
    return name


Layer = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PointName = Annotated[str, Field(max_length=100), AfterValidator(_require_point)]
"""One of `Point`, or as TransformerLens or interp-engine spell it, with or without a layer."""


@dataclass(frozen=True, slots=True)
class Target:
    """A point in some layers, and its shape there, which is one for all of them if the edits ask for that."""

    point: Point
    layers: tuple[int, ...]
    shapes: tuple[PointShape, ...]

    @property
    def axis(self) -> Axis:
        """What the numbers of the point are."""
        return ABOUT[self.point].axis

    def shape(self) -> PointShape:
        """That of all its layers. Raises `FieldOutOfRange` if it differs between them."""
        for layer, shape in zip(self.layers, self.shapes, strict=True):
            if shape != self.shapes[0]:
                raise FieldOutOfRange(
                    f"layers: {self.point} has {_told(self.shapes[0])} in layer {self.layers[0]} and {_told(shape)} in "
                    f"layer {layer}: name layers of one shape at a time",
                    param="layers",
                )
        return self.shapes[0]


def _told(shape: PointShape) -> str:
    return f"{shape.width} numbers" if shape.heads == 1 else f"{shape.heads} heads of {shape.width // shape.heads}"


def find_target(info: ModelInfo, name: str, layers: Mapping[str, int], *, param: str = "point") -> Target:
    """The point of that name in `layers`, which are by the names of their fields; `param` is that of `name`.

    Raises `FieldOutOfRange` for a point or a layer that the model does not have, for a layer that lacks the point, for
    one that is given twice, and for one too few or too many.
    """
    found = find_point(name)
    assert found is not None
    point, own = found
    shapes = info.points.get(point)
    if shapes is None:
        has = names_of(info.points)
        raise FieldOutOfRange(f"{param}: {info.name} has no {point}; its points are {has}", param=param)
    if layers and (own is not None or point in WHOLE):
        field = next(iter(layers))
        why = f"{point} is a point of the model, and none of a layer" if own is None else f"{param} names one: {name}"
        raise FieldOutOfRange(f"{field}: leave it out, for {why}", param=field)
    if point in WHOLE:
        layers = {param: next(layer for layer, shape in enumerate(shapes) if shape)}
    elif own is not None:
        layers = {param: own}
    if not layers:
        raise FieldOutOfRange("layer: give exactly one of layer and layers, not none", param="layer")
    chosen = dict[int, PointShape]()
    for field, layer in layers.items():
        if layer >= info.num_layers:
            raise FieldOutOfRange(f"{field}: {layer} must be from 0 to {info.num_layers - 1}", param=field)
        if layer in chosen:
            raise FieldOutOfRange(f"{field}: {layer} is given twice", param=field)
        shape = shapes[layer]
        if shape is None:
            having = ", ".join(str(layer) for layer, each in enumerate(shapes) if each)
            raise FieldOutOfRange(f"{field}: layer {layer} has no {point}; layers {having} have", param=field)
        chosen[layer] = shape
    rising = sorted(chosen)
    return Target(point, tuple(rising), tuple(chosen[layer] for layer in rising))


def check_action(action: Action, point: Point, *, param: str = "point") -> None:
    """Raise `FieldOutOfRange` if the action makes no sense at the point."""
    about = ABOUT[point]
    why = {Action.EDIT: about.no_edit, Action.PAUSE: about.no_pause}.get(action)
    if why is not None:
        raise FieldOutOfRange(f"{param}: {point} cannot take action {action}: {why}", param=param)


def check_heads(numbers: tuple[int, ...], target: Target, *, param: str) -> None:
    """Raise `FieldOutOfRange` for heads that a capture cannot choose."""
    if target.axis not in (Axis.HEADS, Axis.KEYS):
        raise FieldOutOfRange(
            f"{param}: {target.point} has no heads; {_having(Axis.HEADS, Axis.KEYS)} have", param=param
        )
    _check_numbers(numbers, min(shape.heads for shape in target.shapes), "head", param=param)


def check_part(kind: PartKind, numbers: tuple[int, ...], target: Target, *, param: str) -> int:
    """How many heads, neurons or experts the point has. Raises `FieldOutOfRange` for a point that has none of the kind,
    and for those that are not there.
    """
    axes = PARTS[kind]
    if target.axis not in axes:
        raise FieldOutOfRange(f"{param}: {target.point} has no {kind}; {_having(*axes)} have", param=param)
    shape = target.shape()
    of = shape.heads if kind is PartKind.HEADS else shape.width
    _check_numbers(numbers, of, kind.value.removesuffix("s"), param=param)
    return of


def _having(*axes: Axis) -> str:
    return names_of(point for point, about in ABOUT.items() if about.axis in axes)


def _check_numbers(numbers: tuple[int, ...], of: int, noun: str, *, param: str) -> None:
    if numbers[-1] >= of:
        raise FieldOutOfRange(f"{param}: {noun} {numbers[-1]} must be from 0 to {of - 1}", param=param)


class PointView(BaseModel):
    """A point, in the layers where it has one shape: `width` numbers at each position, evenly divided among `heads`
    (null where there are none). A pattern has `width` numbers for each key.
    """

    name: Point
    aliases: list[str] = Field(description="other names that are understood")
    meaning: str
    layers: list[int] | None = Field(description="those that have it; null: it is a point of the model")
    width: int
    heads: int | None
    no_edit: str | None = Field(description="why it cannot be edited; null: it can")
    no_pause: str | None = Field(description="why a pass cannot stop there; null: it can")


class PointList(BaseModel):
    """The points of the model in the order of a pass. One of which layers differ has an entry for each shape."""

    data: list[PointView]

    @classmethod
    def of(cls, points: Points) -> Self:
        """Those of a model."""
        views = []
        for point in Point:
            shapes, about = points.get(point, ()), ABOUT[point]
            for shape in dict.fromkeys(filter(None, shapes)):
                having = [layer for layer, each in enumerate(shapes) if each == shape]
                views.append(
                    PointView(
                        name=point,
                        aliases=[alias for alias, named in ALIASES.items() if named is point],
                        meaning=about.meaning,
                        layers=None if point in WHOLE else having,
                        width=shape.width,
                        heads=shape.heads if about.axis in (Axis.HEADS, Axis.KEYS) else None,
                        no_edit=about.no_edit,
                        no_pause=about.no_pause,
                    )
                )
        return cls(data=views)


def as_number(value: object) -> object:
    """A field of a form is text."""
    return int(value) if isinstance(value, str) and value.isdecimal() and value.isascii() else value


def place_of_hook(hook: str | None, own_layer: int | None, own_point: str | None, info: ModelInfo) -> tuple[int, Point]:
    """The layer and the point that a hook's name, or else the form, names."""
    param = "layer" if hook is None else "cfg.hook_name"
    found = find_point(own_point or Point.RESID_POST) if hook is None else find_point(hook)
    if found is None:
        if hook is not None:
            wrong = f"{param}: {hook} must be a point of a layer, as TransformerLens calls it"
            raise FieldOutOfRange(wrong, param=param)
        raise FieldOutOfRange(f"point: there is no point {own_point}", param="point")
    point, layer = found
    if hook is not None and own_point is not None and (own := find_point(own_point)) != found:
        point_of = "no point" if own is None else f"not {hook}, which cfg.json names"
        raise FieldOutOfRange(f"point: {own_point} is {point_of}", param="point")
    if own_layer is not None and layer not in (None, own_layer):
        raise FieldOutOfRange(f"layer: {own_layer}, but {hook or own_point} is in layer {layer}", param="layer")
    layer = own_layer if layer is None else layer
    if layer is None:
        raise FieldOutOfRange("layer: required, as no cfg.json says where the dictionary belongs", param="layer")
    if point is Point.RESID_PRE and layer > 0:
        point, layer = Point.RESID_POST, layer - 1  # the same tensor, which is there without entering the layer
    if layer >= info.num_layers:
        raise FieldOutOfRange(f"{param}: layer {layer} must be from 0 to {info.num_layers - 1}", param=param)
    return layer, point


def width_at(point: Point, layer: int, info: ModelInfo, *, param: str = "cfg.hook_name") -> int:
    """How many numbers the point has. Raises `FieldOutOfRange` where a dictionary or a probe cannot be."""
    shape = info.points[point][layer] if point in info.points else None
    if shape is None or ABOUT[point].axis in (Axis.KEYS, Axis.STATE):
        there = [each for each in info.points if info.points[each][layer] is not None]
        wrong = f"{param}: layer {layer} has no {point} with a row of numbers at each position; it has "
        raise FieldOutOfRange(wrong + names_of(there), param=param)
    return shape.width
