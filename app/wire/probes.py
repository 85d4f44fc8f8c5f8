"""Probes and lenses that clients upload, what is said of those that are kept, and how a breakpoint names a probe.

A probe is a classifier. A lens is matrices, one for each layer. A tuned lens is that of Belrose et al.
(arXiv:2303.08112, github.com/AlignmentResearch/tuned-lens). There translator i is for `hidden_states[i]`: the stream
after layer i - 1 here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, Field, model_validator

from app.domain.activations import LensKind, StoredFile, StoredProbe, Translators
from app.domain.breakpoints import Then
from app.domain.errors import FieldOutOfRange
from app.domain.points import Point
from app.domain.values import ModelInfo
from app.wire.base import MAX_COUNT, View, WireModel, list_shape
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
        return cls(**asdict(found), name=name, output="sigmoid" if found.sigmoid else "none")


NamedProbeList = list_shape("NamedProbeList", "The caller's probes by name.", NamedProbeView)


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
            raise FieldOutOfRange.at("probe", "give both above and then, or none")
        return self


class ProbeView(View):
    """A probe as it was when its breakpoint was armed."""

    name: str
    above: float | None
    then: Then | None


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
        raise FieldOutOfRange.at(WEIGHTS, f"its tensors must be {', '.join(LINEAR)} or {', '.join(DEEP)}, not {given}")
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


NAME = re.compile(r"(?:layers\.)?(\d{1,4})\.(weight|bias)", re.ASCII)


class NamedLensFields(WireModel):
    """The fields of the form beside the file."""

    name: str = Field(pattern=VECTOR_NAME)
    kind: Annotated[LensKind, Field(strict=False)] = Field(
        description="what the head reads: tuned: h + W h + b; jacobian: W h + b"
    )


class NamedLensView(BaseModel):
    """A lens that reads the residual streams after `layers`."""

    name: str
    kind: LensKind
    layers: list[int]
    bytes: int
    loaded: bool = Field(description="false: the device's memory for uploads was full when the server started")

    @classmethod
    def of(cls, name: str, found: Translators, *, loaded: bool) -> Self:
        """The wire form of a lens of that name."""
        return cls(name=name, kind=found.lens, layers=list(found.layers), bytes=found.file.bytes, loaded=loaded)


NamedLensList = list_shape("NamedLensList", "The caller's lenses by name.", NamedLensView)


def read_lens(
    weights: Path, asked: NamedLensFields, info: ModelInfo
) -> tuple[Callable[[StoredFile], Translators], dict[str, NDArray[np.float32]]]:
    """What is known of the lens but for the file that it will have, and the tensors of that.

    Raises `MalformedRequest` for a file that is none, `FieldOutOfRange`, which names the tensor.
    """
    found = dict[str, NDArray[np.float32]]()
    for name, tensor in read_arrays(weights, param=WEIGHTS).items():
        param, place = f"{WEIGHTS}.{name[:100]}", NAME.fullmatch(name)
        if place is None or int(place[1]) >= info.num_layers:
            last = info.num_layers - 1
            raise FieldOutOfRange.at(param, f"names are 0.weight and 0.bias to {last}.weight, {last}.bias")
        layer, kind = int(place[1]), place[2]
        shape = (info.hidden_size,) if kind == "bias" else (info.hidden_size, info.hidden_size)
        check_array(tensor, shape, param=param)
        if f"{layer}.{kind}" in found:
            raise FieldOutOfRange.at(param, "the layer has another")
        found[f"{layer}.{kind}"] = tensor
    layers = tuple(sorted({int(name.partition(".")[0]) for name in found}))
    for layer in layers:
        if f"{layer}.weight" not in found:
            raise FieldOutOfRange.at(f"{WEIGHTS}.{layer}.weight", "missing")
    if not layers:
        raise FieldOutOfRange.at(WEIGHTS, "it has no tensors")
    return lambda file: Translators(file, asked.kind, layers), found
