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
from typing import TYPE_CHECKING, Any

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


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; none if it has no weights. Raises BrokenModel."""
    listed = shard_of_tensors(folder)
    if listed is not None:
        return [folder / file for file in sorted(set(listed.values()))]
    single = folder / SINGLE
    return [single] if single.exists() else []


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


Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class GgufIndex:
    """The tensors of `file`, which has `nbytes` bytes. They are read, never mapped: where somebody truncates a mapped
    file, the next look at it ends the process.
    """

    file: Path
    nbytes: int
    tensors: Mapping[str, GgufTensor]

    def write(self, folder: Path) -> None:
        """Write it into `folder`; a file in the same folder is named relative to it."""
        file = self.file.name if self.file.parent == folder else str(self.file)
        tensors = {name: asdict(tensor) for name, tensor in self.tensors.items()}
        (folder / GGUF_INDEX).write_text(json.dumps({"file": file, "nbytes": self.nbytes, "tensors": tensors}))

    @classmethod
    def read(cls, folder: Path) -> GgufIndex:
        """The index in `folder`. Raises BrokenModel if it cannot be read."""
        try:
            found = json.loads((folder / GGUF_INDEX).read_text())
            tensors = {
                name: GgufTensor(**{**fields, "shape": tuple(fields["shape"])})
                for name, fields in found["tensors"].items()
            }
            index = cls(folder / found["file"], int(found["nbytes"]), tensors)
            for name, tensor in tensors.items():
                _check(name, tensor, index.nbytes)
            return index
        except DAMAGED as error:
            raise BrokenModel(f"cannot read {folder / GGUF_INDEX}: {error!r}", param="model") from error

    def rows(self, name: str) -> Bytes:
        """The bytes of tensor `name`, `[rows, bytes of a row]`, with its rows in the order that Transformers has.

        A vector is one row. Raises KeyError for a name that is not in the index, BrokenModel if the file is gone or is
        not the one that the index was made of.
        """
        tensor = self.tensors[name]
        data = bytearray(tensor.nbytes)
        try:
            with self.file.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(tensor.offset)
                read = file.readinto(data)
        except OSError as error:
            raise BrokenModel(f"cannot read {self.file}: {error.strerror}", param="model") from error
        if size != self.nbytes or read != tensor.nbytes:
            raise BrokenModel(f"{self.file} has changed: it has {size} bytes, not {self.nbytes}", param="model")
        found: Bytes = np.frombuffer(data, np.uint8)
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


def _check(name: str, tensor: GgufTensor, file_bytes: int) -> None:
    """Raise ValueError or KeyError unless the tensor lies in the file and is as large as its shape says."""
    import gguf  # a start reads vectors with it anyway

    numbers = (*tensor.shape, tensor.offset, tensor.nbytes, tensor.heads)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{name}: sizes must be whole numbers")
    if tensor.offset + tensor.nbytes > file_bytes:
        raise ValueError(f"{name} ends after byte {file_bytes}, the last of the file")
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
    return [GgufIndex.read(folder).file] if is_indexed(folder) else shard_files(folder)


if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
    from transformers import PretrainedConfig

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name to shape, as Transformers has them."""

_MODEL_TYPES = {"llama": {"llama", "mistral"}, "qwen2": {"qwen2"}, "qwen3": {"qwen3"}}
"""By the file's architecture, the model types whose tensors have the same rows there and in Transformers, but for the
rotary pairs of `llama`. GPT-2's are transposed."""


def is_read_in_place(reader: GGUFReader, architecture: str, model_type: str) -> bool:
    """Whether every tensor of the file can be kept as it is."""
    return (
        model_type in _MODEL_TYPES.get(architecture, ())
        and reader.byte_order == "I"
        and all(_is_known(kind) for kind in {tensor.tensor_type for tensor in reader.tensors})
    )


def index_tensors(reader: GGUFReader, source: Path, config: PretrainedConfig, shapes: Shapes) -> GgufIndex:
    """Where the parameters `shapes` of a model of `config` are in the file `source`.

    Raises ValueError if one is missing or has another shape, or if the file has a tensor that no parameter needs.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = str(reader.fields["general.architecture"].contents())
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names: Any = get_tensor_name_map(arch, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    sought = {name: names.get_name(name, try_suffixes=(".weight", ".bias")) for name in shapes}
    lacking = sorted(name for name, place in sought.items() if place not in stored)
    if lacking:
        raise ValueError(f"it lacks {', '.join(lacking[:5])}")
    left = sorted(stored.keys() - set(sought.values()))
    if left:
        raise ValueError(f"the model has no use for its tensors {', '.join(left[:5])}")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    heads = heads if architecture == "llama" else {}
    tensors = {name: _entry(stored[place], name, shapes[name], heads) for name, place in sought.items()}
    return GgufIndex(source, source.stat().st_size, tensors)


def _entry(tensor: ReaderTensor, name: str, shape: tuple[int, ...], heads: Mapping[str, int]) -> GgufTensor:
    found = tuple(int(length) for length in reversed(tensor.shape))
    if found != shape:
        raise ValueError(f"{name} is {found}, must be {shape}")
    module = name.split(".")[-2]
    offset, nbytes = int(tensor.data_offset), int(tensor.n_bytes)
    return GgufTensor(tensor.tensor_type.name, shape, offset, nbytes, heads.get(module, 0))


def _is_known(kind: GGMLQuantizationType) -> bool:
    """Whether gguf knows the values that tensors of this kind stand for."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Of one tensor, and the bytes that it takes in its file."""

    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


def stored_sizes(folder: Path) -> dict[str, StoredSize]:
    """Every tensor that a model's folder stores, by name. Raises BrokenModel if the files cannot be read."""
    if is_indexed(folder):
        tensors = GgufIndex.read(folder).tensors
        return {name: StoredSize(tensor.shape, tensor.nbytes) for name, tensor in tensors.items()}
    sizes: dict[str, StoredSize] = {}
    for path in weight_files(folder):
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            for name in header.keys() - {"__metadata__"}:
                begin, end = header[name]["data_offsets"]
                sizes[name] = StoredSize(tuple(map(operator.index, header[name]["shape"])), end - begin)
        except DAMAGED as error:
            raise BrokenModel(f"cannot read {path}: {error}", param="model") from error
    return sizes
