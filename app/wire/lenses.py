"""Lenses: matrices that clients upload, one for each layer, and what is said of those that are kept.

A tuned lens is that of Belrose et al. (arXiv:2303.08112, github.com/AlignmentResearch/tuned-lens). There translator i
is for `hidden_states[i]`: the stream after layer i - 1 here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from app.domain.errors import FieldOutOfRange
from app.domain.uploads import LensKind, StoredFile, Translators
from app.domain.values import ModelInfo
from app.wire.base import WireModel
from app.wire.edits import VECTOR_NAME
from app.wire.tensors import check_array, read_arrays

WEIGHTS = "weights"
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


class NamedLensList(BaseModel):
    """The caller's lenses by name."""

    data: list[NamedLensView]


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
            raise FieldOutOfRange(f"{param}: names are 0.weight and 0.bias to {last}.weight, {last}.bias", param=param)
        layer, kind = int(place[1]), place[2]
        shape = (info.hidden_size,) if kind == "bias" else (info.hidden_size, info.hidden_size)
        check_array(tensor, shape, param=param)
        if f"{layer}.{kind}" in found:
            raise FieldOutOfRange(f"{param}: the layer has another", param=param)
        found[f"{layer}.{kind}"] = tensor
    layers = tuple(sorted({int(name.partition(".")[0]) for name in found}))
    for layer in layers:
        if f"{layer}.weight" not in found:
            raise FieldOutOfRange(f"{WEIGHTS}.{layer}.weight: missing", param=f"{WEIGHTS}.{layer}.weight")
    if not layers:
        raise FieldOutOfRange(f"{WEIGHTS}: it has no tensors", param=WEIGHTS)
    return lambda file: Translators(file, asked.kind, layers), found
