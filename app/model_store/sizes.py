"""How large a model's stored tensors are, found without reading one of them."""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from app.model_store.errors import BrokenModel
from app.model_store.gguf.index import GgufIndex, is_indexed, weight_files


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
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            MemoryError,
            OverflowError,
            RecursionError,
        ) as error:
            raise BrokenModel(f"cannot read {path}: {error}", param="model") from error
    return sizes
