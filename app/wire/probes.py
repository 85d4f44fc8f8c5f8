"""Probes: classifiers that clients upload, what is said of those that are kept, and how a breakpoint names one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, Field, model_validator

from app.domain.breakpoints import Probe, Then
from app.domain.errors import FieldOutOfRange
from app.domain.points import Point
from app.domain.uploads import StoredFile, StoredProbe
from app.domain.values import ModelInfo
from app.wire.base import MAX_COUNT, WireModel
from app.wire.edits import VECTOR_NAME, Float32, VectorName
from app.wire.points import as_number, find_place
from app.wire.tensors import check_array, read_arrays

WEIGHTS = "weights"
MAX_HIDDEN = 1024
LINEAR, DEEP = ("weight", "bias"), ("0.weight", "0.bias", "2.weight", "2.bias")
"""Tensors of `torch.nn.Linear`, and of `torch.nn.Sequential(Linear, ReLU, Linear)`."""


class ProbeFields(WireModel):
    """The fields of the form beside the file."""

    name: str = Field(pattern=VECTOR_NAME)
    layer: Annotated[int, BeforeValidator(as_number)] = Field(ge=0, le=MAX_COUNT)
    point: str = Field(Point.RESID_POST.value, max_length=100)
    output: str = Field("sigmoid", pattern="^(sigmoid|none)$", description="what is made of the last number")


class NamedProbeView(BaseModel):
    """A probe of `point` of `layer`, with so many `hidden` neurons: 0 if it is linear."""

    name: str
    layer: int
    point: Point
    width: int
    hidden: int
    output: str

    @classmethod
    def of(cls, name: str, found: StoredProbe) -> Self:
        """The wire form of a probe of that name."""
        output = "sigmoid" if found.sigmoid else "none"
        return cls(
            name=name, layer=found.layer, point=found.point, width=found.width, hidden=found.hidden, output=output
        )


class NamedProbeList(BaseModel):
    """The caller's probes by name."""

    data: list[NamedProbeView]


class ProbeBody(WireModel):
    """Which probe is read, and what becomes of the turn if it finds more than `above`."""

    name: VectorName
    above: Float32 | None = None
    then: Annotated[Then, Field(strict=False)] | None = Field(
        None,
        description="stop: the turn ends before the next token, with finish_reason probe; pause: it pauses at the "
        "probe; absent: nothing",
    )

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.above is None) != (self.then is None):
            raise FieldOutOfRange("probe: give both above and then, or none", param="probe")
        return self


class ProbeView(BaseModel):
    """A probe as it was when its breakpoint was armed."""

    name: str
    above: float | None
    then: Then | None

    @classmethod
    def of(cls, probe: Probe | None) -> Self | None:
        """The wire form; None: the breakpoint has none."""
        return None if probe is None else cls(name=probe.name, above=probe.above, then=probe.then)


def read_probe(
    weights: Path, asked: ProbeFields, info: ModelInfo
) -> tuple[Callable[[StoredFile], StoredProbe], dict[str, NDArray[np.float32]]]:
    """What is known of the probe but for the file that it will have, and the tensors of that.

    Raises `MalformedRequest` for a file that is none, `FieldOutOfRange`, which names the field or the tensor.
    """
    place, arrays = find_place(info, None, asked.layer, asked.point), read_arrays(weights, param=WEIGHTS)
    width = place.shapes[0].width
    names = DEEP if DEEP[0] in arrays else LINEAR
    if set(arrays) != set(names):
        given = ", ".join(sorted(arrays)[:10])[:200]
        raise FieldOutOfRange(
            f"{WEIGHTS}: its tensors must be {', '.join(LINEAR)} or {', '.join(DEEP)}, not {given}", param=WEIGHTS
        )
    hidden = arrays[DEEP[0]].shape[0] if names is DEEP and arrays[DEEP[0]].ndim else 0
    if names is DEEP and not 1 <= hidden <= MAX_HIDDEN:
        raise FieldOutOfRange(f"{WEIGHTS}.0.weight: {hidden} neurons must be from 1 to {MAX_HIDDEN}", param=WEIGHTS)
    shapes: dict[str, tuple[int, ...]] = {"weight": (1, width), "bias": (1,)}
    if names is DEEP:
        shapes = {"0.weight": (hidden, width), "0.bias": (hidden,), "2.weight": (1, hidden), "2.bias": (1,)}
    for name, shape in shapes.items():
        found = arrays[name][None] if arrays[name].shape == shape[1:] else arrays[name]
        check_array(found, shape, param=f"{WEIGHTS}.{name}")
    numbers = np.concatenate([arrays[name].reshape(-1) for name in names])
    made = place.layers[0], place.point, width, hidden, asked.output == "sigmoid"
    return lambda file: StoredProbe(file, *made), {WEIGHTS: numbers}
