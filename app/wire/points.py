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

PARTS = {PartKind.HEADS: Axis.HEADS, PartKind.NEURONS: Axis.NEURONS, PartKind.EXPERTS: Axis.EXPERTS}
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
    is_paused: bool = False
    """Whether a turn has stopped there: nothing of the same pass can be read any more."""

    @property
    def axis(self) -> Axis:
        """What the numbers of the point are."""
        return ABOUT[self.point].axis

    def shape(self) -> PointShape:
        """That of all its layers. Raises `FieldOutOfRange` if it differs between them."""
        for layer, shape in zip(self.layers, self.shapes, strict=True):
            if shape != self.shapes[0]:
                raise FieldOutOfRange.at(
                    "layers",
                    f"{self.point} has {_told(self.shapes[0])} in layer {self.layers[0]} and {_told(shape)} in "
                    f"layer {layer}: name layers of one shape at a time",
                )
        return self.shapes[0]


def _told(shape: PointShape) -> str:
    return f"{shape.width} numbers" if shape.heads == 1 else f"{shape.heads} heads of {shape.width // shape.heads}"


def named_point(info: ModelInfo, name: str, *, param: str) -> tuple[Point, int | None]:
    """The point of that name or spelling, and the layer that the name has. Raises `FieldOutOfRange` about `param` for
    one that is none, or that the model lacks.
    """
    found, has = find_point(name), names_of(info.points)
    if found is None:
        raise FieldOutOfRange.at(param, f"{name[:100]!r} is no point; those of {info.name} are {has}")
    if found[0] not in info.points:
        raise FieldOutOfRange.at(param, f"{info.name} has no {found[0]}; its points are {has}")
    return found


def layers_of(info: ModelInfo, point: Point) -> list[int]:
    """Those that have the point, rising."""
    return [layer for layer, shape in enumerate(info.points[point]) if shape is not None]


def shape_at(info: ModelInfo, point: Point, layer: int, *, param: str) -> PointShape:
    """What the point is there. Raises `FieldOutOfRange` about `param` if there is no such layer, or it lacks it."""
    if layer >= info.num_layers:
        raise FieldOutOfRange.at(param, f"layer {layer} must be from 0 to {info.num_layers - 1}")
    shape = info.points[point][layer]
    if shape is None:
        having = ", ".join(map(str, layers_of(info, point)))
        raise FieldOutOfRange.at(param, f"layer {layer} has no {point}; layers {having} have")
    return shape


def find_target(info: ModelInfo, name: str, layers: Mapping[str, int], *, param: str = "point") -> Target:
    """The point of that name in `layers`, which are by the names of their fields; `param` is that of `name`.

    Raises `FieldOutOfRange` for a point or a layer that the model does not have, for a layer that lacks the point, for
    one that is given twice, and for one too few or too many.
    """
    point, own = named_point(info, name, param=param)
    if layers and (own is not None or point in WHOLE):
        field = next(iter(layers))
        why = f"{point} is a point of the model, and none of a layer" if own is None else f"{param} names one: {name}"
        raise FieldOutOfRange.at(field, f"leave it out, for {why}")
    if point in WHOLE:
        layers = {param: layers_of(info, point)[0]}
    elif own is not None:
        layers = {param: own}
    if not layers:
        raise FieldOutOfRange.at("layer", "give exactly one of layer and layers, not none")
    chosen = dict[int, PointShape]()
    for field, layer in layers.items():
        if layer in chosen:
            raise FieldOutOfRange.at(field, f"{layer} is given twice")
        chosen[layer] = shape_at(info, point, layer, param=field)
    rising = sorted(chosen)
    return Target(point, tuple(rising), tuple(chosen[layer] for layer in rising))


def find_place(info: ModelInfo, hook: str | None, own_layer: int | None, own_point: str | None) -> Target:
    """Where an upload belongs, which has a row of numbers at each position: as its file says, `hook`, or else the form.
    Raises `FieldOutOfRange` for what the model lacks, and if both say something else.
    """
    param = "point" if hook is None else "cfg.hook_name"
    found = point, layer = named_point(info, hook or own_point or Point.RESID_POST.value, param=param)
    if hook is not None and own_point is not None and find_point(own_point) != found:
        raise FieldOutOfRange.at("point", f"{own_point} is not {hook}, which cfg.json names")
    if own_layer is not None and layer not in (None, own_layer):
        raise FieldOutOfRange.at("layer", f"{own_layer}, but {hook or own_point} is in layer {layer}")
    if layer is None:
        layer = layers_of(info, point)[0] if point in WHOLE and own_layer is None else own_layer
        param = "layer" if own_layer is not None else param
    if layer is None:
        raise FieldOutOfRange.at("layer", "required, as no cfg.json says where the dictionary belongs")
    if point is Point.RESID_PRE and layer > 0:
        point, layer = Point.RESID_POST, layer - 1  # the same tensor, which is there without entering the layer
    shape = shape_at(info, point, layer, param=param)
    if ABOUT[point].axis in (Axis.KEYS, Axis.STATE):
        raise FieldOutOfRange.at(param, f"{point} has no row of numbers at each position")
    return Target(point, (layer,), (shape,))


def place_at(info: ModelInfo, point: Point, layer: int) -> Target:
    """A point that a layer has."""
    shape = info.points[point][layer]
    assert shape is not None
    return Target(point, (layer,), (shape,))


def check_action(action: Action, point: Point, *, param: str = "point") -> None:
    """Raise `FieldOutOfRange` if the action makes no sense at the point."""
    about = ABOUT[point]
    why = {Action.EDIT: about.no_edit, Action.PAUSE: about.no_pause}.get(action)
    if why is not None:
        raise FieldOutOfRange.at(param, f"{point} cannot take action {action}: {why}")


def check_heads(numbers: tuple[int, ...], target: Target) -> None:
    """Raise `FieldOutOfRange` for `heads` that a capture cannot choose."""
    if target.axis not in (Axis.HEADS, Axis.KEYS):
        raise FieldOutOfRange.at("heads", f"{target.point} has no heads; {_having(Axis.HEADS, Axis.KEYS)} have")
    _check_numbers(numbers, min(shape.heads for shape in target.shapes), "head", param="heads")


def check_part(kind: PartKind, numbers: tuple[int, ...], target: Target, *, param: str) -> int:
    """How many heads, neurons or experts the point has. Raises `FieldOutOfRange` for a point that has none of the kind,
    and for those that are not there.
    """
    if target.axis is not PARTS[kind]:
        raise FieldOutOfRange.at(param, f"{target.point} has no {kind}; {_having(PARTS[kind])} have")
    shape = target.shape()
    of = shape.heads if kind is PartKind.HEADS else shape.width
    _check_numbers(numbers, of, kind.value.removesuffix("s"), param=param)
    return of


def _having(*axes: Axis) -> str:
    return names_of(point for point, about in ABOUT.items() if about.axis in axes)


def _check_numbers(numbers: tuple[int, ...], of: int, noun: str, *, param: str) -> None:
    if numbers[-1] >= of:
        raise FieldOutOfRange.at(param, f"{noun} {numbers[-1]} must be from 0 to {of - 1}")


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
