"""Reading the tensors of a GGUF file by its index."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from app.model_store.errors import BrokenModel
from app.model_store.gguf.index import GgufIndex

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


class GgufTensors:
    """The tensors of the file that the index in a folder names. They are read, never mapped: where somebody truncates
    a mapped file, the next look at it ends the process.
    """

    def __init__(self, folder: Path) -> None:
        """Raises BrokenModel if the index cannot be read."""
        self._index = GgufIndex.read(folder)
        self.path, self.tensors = self._index.file, self._index.tensors

    def rows(self, name: str) -> Bytes:
        """The bytes of tensor `name`, `[rows, bytes of a row]`, with its rows in the order that Transformers has.

        A vector is one row. Raises KeyError for a name that is not in the index, BrokenModel if the file is gone or is
        not the one that the index was made of.
        """
        tensor = self.tensors[name]
        data = bytearray(tensor.nbytes)
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(tensor.offset)
                read = file.readinto(data)
        except OSError as error:
            raise BrokenModel(f"cannot read {self.path}: {error.strerror}", param="model") from error
        if size != self._index.nbytes or read != tensor.nbytes:
            raise BrokenModel(f"{self.path} has changed: it has {size} bytes, not {self._index.nbytes}", param="model")
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
