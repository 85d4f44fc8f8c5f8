"""Weights in a GGUF file that is read in place."""

import re
from pathlib import Path

import torch
from torch import Tensor

from app.gpu.kernels.linear.matrix import BlockMatrix, Matrix
from app.gpu.weights.form import Form, nbytes_of
from app.model_store.errors import BrokenModel
from app.model_store.gguf.tensors import GgufTensors

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFile:
    """The file that the index in a model's folder names."""

    def __init__(self, folder: Path, form: Form) -> None:
        self.nbytes = 0
        self._form = form
        self._tensors = GgufTensors(folder)
        self._left = set(self._tensors.tensors)

    def holds(self, name: str) -> bool:
        """See `WeightSource.holds`."""
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightSource.take`."""
        self._check_off(name, shape)
        tensor = self._form.dense(torch.from_numpy(self._tensors.values(name)))
        self.nbytes += tensor.nbytes
        return tensor

    def take_matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `WeightSource.take_matrix`."""
        if not self._form.keeps_matrices:
            return self.take(name, shape)
        self._check_off(name, shape)
        matrix = self._form.matrix(name, self._read(name, shape))
        self.nbytes += nbytes_of(matrix)
        return matrix

    def outline(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `WeightSource.outline`."""
        if name not in self._left:
            raise BrokenModel(f"{self._tensors.path} has no tensor {name!r}", param="model")
        kind, nbytes = self._tensors.tensors[name].kind, self._tensors.tensors[name].nbytes
        if kind in _FLOATS:
            return self._form.outline(name, torch.empty(shape, dtype=_FLOATS[kind], device="meta"))
        rows = torch.empty((shape[0], nbytes // shape[0]), dtype=torch.uint8, device="meta")
        return self._form.outline(name, BlockMatrix(kind, rows, shape))

    def finish(self, ignored: re.Pattern[str]) -> None:
        """See `WeightSource.finish`."""
        left = sorted(name for name in self._left if not ignored.search(name))
        if left:
            raise BrokenModel(f"the model has no use for {', '.join(left[:8])} in {self._tensors.path}", param="model")

    def _check_off(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._left:
            raise BrokenModel(f"{self._tensors.path} has no tensor {name!r}", param="model")
        found = self._tensors.tensors[name].shape
        if found != shape:
            raise BrokenModel(f"tensor {name!r} in {self._tensors.path} is {found}, must be {shape}", param="model")
        self._left.remove(name)

    def _read(self, name: str, shape: tuple[int, int]) -> Matrix:
        kind, rows = self._tensors.tensors[name].kind, torch.from_numpy(self._tensors.rows(name))
        return rows.view(_FLOATS[kind]) if kind in _FLOATS else BlockMatrix(kind, rows, shape)
