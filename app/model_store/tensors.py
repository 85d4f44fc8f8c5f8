"""Where the tensors of a model are stored, and how large they are: in folders of safetensors, and in GGUF files.

It is found once, when the file is first seen. So a start reads no metadata of the file, and loads no library for that.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from app.model_store.install import DAMAGED, BrokenModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def shard_of_tensors(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, as the folder's index lists them; None: there is no index. Raises BrokenModel.

    A folder may hold other files with the same weights, such as `consolidated.safetensors`, which Djinn does not read.
    """
    index = folder / INDEX
    if not index.exists():
        return None
    try:
        listed = dict(json.loads(index.read_text())["weight_map"])
    except DAMAGED as error:
        raise BrokenModel(f"{index} has no weight_map that can be read: {error!r}", param="model") from error
    for file in listed.values():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise BrokenModel(f"{index} names {file!r}, which is no file of its folder", param="model")
    return listed


GGUF_INDEX = "gguf.json"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of `nbytes` bytes at `offset`. `kind` is its type's name in gguf's `GGMLQuantizationType`."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    heads: int = 0
    """Heads whose rows are interleaved for rotary pairs, which Transformers keeps as halves. 0: rows are in order."""
    file: int = 0
    """The number of its file."""
    added: float = 0.0
    """What the file has added to each number, of tensors in float32."""


Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class GgufIndex:
    """The tensors of `files`, which have `sizes` bytes. They are read, never mapped: where somebody truncates a mapped
    file, the next look at it ends the process.
    """

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    tensors: Mapping[str, GgufTensor]

    def write(self, folder: Path) -> None:
        """Write it into `folder`; files in the same folder are named relative to it."""
        files = [file.name if file.parent == folder else str(file) for file in self.files]
        tensors = {name: asdict(tensor) for name, tensor in self.tensors.items()}
        (folder / GGUF_INDEX).write_text(json.dumps({"files": files, "sizes": self.sizes, "tensors": tensors}))

    @classmethod
    def read(cls, folder: Path) -> GgufIndex:
        """The index in `folder`. Raises BrokenModel if it cannot be read."""
        try:
            found = json.loads((folder / GGUF_INDEX).read_text())
            tensors = {
                name: GgufTensor(**{**fields, "shape": tuple(fields["shape"])})
                for name, fields in found["tensors"].items()
            }
            files = tuple(folder / file for file in found["files"])
            index = cls(files, tuple(map(int, found["sizes"])), tensors)
            for name, tensor in tensors.items():
                _check(name, tensor, index.sizes)
            return index
        except DAMAGED as error:
            raise BrokenModel(f"cannot read {folder / GGUF_INDEX}: {error!r}", param="model") from error

    def rows(self, name: str) -> Bytes:
        """The bytes of tensor `name`, `[rows, bytes of a row]`, with its rows in the order that Transformers has.

        A vector is one row. Raises KeyError for a name that is not in the index, BrokenModel if the file is gone or is
        not the one that the index was made of.
        """
        tensor = self.tensors[name]
        data, path, nbytes = bytearray(tensor.nbytes), self.files[tensor.file], self.sizes[tensor.file]
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(tensor.offset)
                read = file.readinto(data)
        except OSError as error:
            raise BrokenModel(f"cannot read {path}: {error.strerror}", param="model") from error
        if size != nbytes or read != tensor.nbytes:
            raise BrokenModel(f"{path} has changed: it has {size} bytes, not {nbytes}", param="model")
        found: Bytes = np.frombuffer(data, np.uint8)
        if tensor.added:
            found = (found.view(np.float32) - np.float32(tensor.added)).view(np.uint8)
        if not tensor.heads:
            return found.reshape(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)
        pairs = found.reshape(tensor.heads, tensor.shape[0] // tensor.heads // 2, 2, -1)
        return pairs.swapaxes(1, 2).reshape(tensor.shape[0], -1)

    def values(self, name: str) -> Floats:
        """Tensor `name` in float32, in its shape. Raises as `rows` does."""
        import gguf

        tensor = self.tensors[name]
        kind = gguf.GGMLQuantizationType[tensor.kind]
        values: Floats = gguf.quants.dequantize(self.rows(name), kind).reshape(tensor.shape)
        return values


def _check(name: str, tensor: GgufTensor, sizes: tuple[int, ...]) -> None:
    """Raise ValueError or LookupError unless the tensor lies in its file and is as large as its shape says."""
    import gguf  # a start reads vectors with it anyway

    numbers = (*tensor.shape, tensor.offset, tensor.nbytes, tensor.heads, tensor.file)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{name}: sizes must be whole numbers")
    if tensor.offset + tensor.nbytes > sizes[tensor.file]:
        raise ValueError(f"{name} ends after byte {sizes[tensor.file]}, the last of the file")
    if not isinstance(tensor.added, float) or (tensor.added and tensor.kind != "F32"):
        raise ValueError(f"{name}: {tensor.added!r} cannot be added to {tensor.kind}")
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.kind]]
    if not tensor.shape or tensor.shape[-1] % block or prod(tensor.shape) // block * block_bytes != tensor.nbytes:
        raise ValueError(f"{name}: {tensor.nbytes} bytes are not {tensor.shape} of {tensor.kind}")
    if tensor.heads and tensor.shape[0] % (2 * tensor.heads):
        raise ValueError(f"{name}: {tensor.heads} heads do not divide {tensor.shape[0]} rows into halves")


def is_indexed(folder: Path) -> bool:
    """Whether the weights of a model's folder are in a GGUF file."""
    return (folder / GGUF_INDEX).is_file()


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a model's folder; none if it has no weights. Raises BrokenModel."""
    if is_indexed(folder):
        return list(GgufIndex.read(folder).files)
    listed = shard_of_tensors(folder)
    if listed is not None:
        return [folder / file for file in sorted(set(listed.values()))]
    return [folder / SINGLE] if (folder / SINGLE).exists() else []


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor that a model's folder stores, by name. Raises BrokenModel if the files cannot be read."""
    if is_indexed(folder):
        return {name: tensor.shape for name, tensor in GgufIndex.read(folder).tensors.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            for name in header.keys() - {"__metadata__"}:
                _, _ = header[name]["data_offsets"]
                shapes[name] = tuple(map(operator.index, header[name]["shape"]))
        except DAMAGED as error:
            raise BrokenModel(f"cannot read {path}: {error}", param="model") from error
    return shapes
