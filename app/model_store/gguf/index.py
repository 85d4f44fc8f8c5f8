"""Where each tensor of a model lies in a GGUF file, by the name that Transformers gives it.

It is found once, when the file is first seen. So a start reads no metadata of the file, and loads no library for that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from app.model_store.errors import BrokenModel
from app.model_store.shards import shard_files

INDEX = "gguf.json"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of `nbytes` bytes at `offset`. `kind` is its type's name in gguf's `GGMLQuantizationType`."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    heads: int = 0
    """Heads whose rows are interleaved for rotary pairs, which Transformers keeps as halves. 0: rows are in order."""


@dataclass(frozen=True, slots=True)
class GgufIndex:
    """The tensors of `file`, which has `nbytes` bytes."""

    file: Path
    nbytes: int
    tensors: Mapping[str, GgufTensor]

    def write(self, folder: Path) -> None:
        """Write it into `folder`; a file in the same folder is named relative to it."""
        file = self.file.name if self.file.parent == folder else str(self.file)
        tensors = {name: asdict(tensor) for name, tensor in self.tensors.items()}
        (folder / INDEX).write_text(json.dumps({"file": file, "nbytes": self.nbytes, "tensors": tensors}))

    @classmethod
    def read(cls, folder: Path) -> GgufIndex:
        """The index in `folder`. Raises BrokenModel if it cannot be read."""
        try:
            found = json.loads((folder / INDEX).read_text())
            tensors = {
                name: GgufTensor(**{**fields, "shape": tuple(fields["shape"])})
                for name, fields in found["tensors"].items()
            }
            index = cls(folder / found["file"], int(found["nbytes"]), tensors)
            for name, tensor in tensors.items():
                _check(name, tensor, index.nbytes)
            return index
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise BrokenModel(f"cannot read {folder / INDEX}: {error!r}", param="model") from error


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
    return (folder / INDEX).is_file()


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a model's folder; none if it has no weights. Raises BrokenModel."""
    return [GgufIndex.read(folder).file] if is_indexed(folder) else shard_files(folder)
