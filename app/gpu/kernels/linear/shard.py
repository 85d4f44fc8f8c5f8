"""One rank's part of a model's layers: some heads of attention, some columns of the MLP (Shoeybi et al.,
arXiv:1909.08053). Layers that give these cut their output features; those that take them cut their inputs, and all
ranks' results are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.gpu.kernels.linear.base import Linear, Weight
from app.gpu.kernels.linear.eight_bits import FLOAT8, FLOAT8_STEP
from app.gpu.kernels.linear.matrix import BlockMatrix, Matrix, split


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `ranks` equal ones. Two things take all of them: `total` sums `[tokens, features]`, in a tensor of
    its own; `beside` gives rank 0 the logits `[rows, vocab_size]` of those for each rank's `vocabulary`, and that size.
    """

    rank: int = 0
    ranks: int = 1
    total: Callable[[Tensor], Tensor] = lambda part: part
    beside: Callable[[Tensor, int], Tensor] = lambda part, size: part

    def share(self, count: int) -> int:
        """How many of `count` heads or features are here; the ranks divide them."""
        return count // self.ranks

    def rows(self, matrix: Matrix) -> Matrix:
        """The share of the output features of `matrix` `[out, in]`."""
        return matrix if self.ranks == 1 else self._part_of(matrix, self.share(matrix.shape[0]))

    def vocabulary(self, matrix: Matrix) -> Matrix:
        """The share of the rows of an output projection, whose number the ranks need not divide: the last has fewer."""
        return matrix if self.ranks == 1 else self._part_of(matrix, -(-matrix.shape[0] // self.ranks))

    def values(self, bias: Tensor) -> Tensor:
        """The same of a bias `[out]`."""
        return bias if self.ranks == 1 else bias.chunk(self.ranks)[self.rank]

    def columns(self, matrix: Matrix) -> Matrix:
        """The share of the inputs of `matrix` `[out, in]`. Blocks that the cut goes through become float32."""
        if self.ranks == 1:
            return matrix
        rows, width = matrix.shape[0], self.share(matrix.shape[1])
        if not isinstance(matrix, BlockMatrix):
            return self._columns_of(matrix)
        if width % _block_length(matrix.kind):
            return self.columns(matrix.dequantize())
        blocks, scales = matrix.rows, matrix.rows[:, :0]
        if matrix.kind == FLOAT8:  # a row has one scale, behind its numbers
            blocks, scales = blocks.tensor_split([matrix.shape[1]], dim=1)
        return BlockMatrix(matrix.kind, torch.cat((self._columns_of(blocks), scales), 1), (rows, width))

    def once(self, bias: Tensor) -> Tensor | None:
        """The bias of a layer whose results are summed: one rank adds it."""
        return bias if self.rank == 0 else None

    def summed(self, linear: Linear) -> Linear:
        """The layer whose inputs are cut, which gives the sum over all ranks."""
        return linear if self.ranks == 1 else _Summed(linear, self.total)

    def _part_of(self, matrix: Matrix, length: int) -> Matrix:
        """A copy of this rank's `length` rows, so that the whole is not kept."""
        part = split(matrix, length)[self.rank]
        return BlockMatrix(part.kind, part.rows.clone(), part.shape) if isinstance(part, BlockMatrix) else part.clone()

    def _columns_of(self, rows: Tensor) -> Tensor:
        return rows.chunk(self.ranks, dim=1)[self.rank].clone(memory_format=torch.contiguous_format)


WHOLE = Shard()
"""Of a model that one process runs."""


class _Summed:
    """See `Linear`."""

    def __init__(self, linear: Linear, total: Callable[[Tensor], Tensor]) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._linear, self._total = linear, total

    @property
    def weights(self) -> Sequence[Weight]:
        return self._linear.weights

    def __call__(self, x: Tensor) -> Tensor:
        return self._total(self._linear(x))


def _block_length(kind: str) -> int:
    """Inputs of a matrix in blocks are a multiple of this."""
    if kind == FLOAT8:
        return FLOAT8_STEP
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
