"""Weights whose matrices keep a type of their own, as checkpoints have them."""

from __future__ import annotations

import re
from collections.abc import Callable

import gguf
import torch
from torch import Tensor

from app.gpu.linear.matrix import BlockMatrix, Matrix
from app.gpu.weights.source import WeightSource

Keep = Callable[[str, Tensor], Matrix]
"""A matrix by its name as it is kept."""


class Storing:
    """A `WeightSource` that hands out the matrices of another one as `keep` has them."""

    def __init__(self, source: WeightSource, keep: Keep) -> None:
        self.nbytes = 0
        self._source, self._keep = source, keep

    def holds(self, name: str) -> bool:
        return self._source.holds(name)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._source.take(name, shape)
        self.nbytes += tensor.nbytes
        return tensor

    def take_matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        matrix = self._keep(name, self._source.take(name, shape))
        self.nbytes += matrix.nbytes if isinstance(matrix, Tensor) else matrix.rows.nbytes
        return matrix

    def outline(self, name: str, shape: tuple[int, int]) -> Matrix:
        return self._keep(name, torch.empty(shape, device="meta"))

    def finish(self, ignored: re.Pattern[str]) -> None:
        self._source.finish(ignored)


def as_dtype(dtype: torch.dtype) -> Keep:
    """Every matrix as `dtype`."""
    return lambda name, matrix: matrix.to(dtype)


def in_blocks(kind: str) -> Keep:
    """Every matrix in blocks of `kind`, also on `meta`."""

    def keep(name: str, matrix: Tensor) -> Matrix:
        type_, shape = gguf.GGMLQuantizationType[kind], (matrix.shape[0], matrix.shape[1])
        if matrix.is_meta:
            rows = torch.empty(gguf.quant_shape_to_byte_shape(shape, type_), dtype=torch.uint8, device="meta")
        else:
            rows = torch.from_numpy(gguf.quants.quantize(matrix.numpy(), type_))
        return BlockMatrix(kind, rows, shape)

    return keep
