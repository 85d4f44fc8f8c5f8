"""Matrices as checkpoints have them: dense in any float type, or in the quantized blocks of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.kernels.linear.eight_bits import FLOAT8, INT8, dequantize


@dataclass(frozen=True, slots=True, eq=False)
class BlockMatrix:
    """A matrix `[out, in]` of which each row is a run of quantized blocks, as GGUF files have them.

    `kind` is the name of its type in gguf's `GGMLQuantizationType`, such as "Q4_1", or `FLOAT8`. `rows` is `[out, bytes
    of a row]` uint8, on the host; those of 8 bits, see `eight_bits`, may be on any device.
    """

    kind: str
    rows: Tensor
    shape: tuple[int, int]

    def dequantize(self, ids: Tensor | None = None) -> Tensor:
        """Rows `ids` `[n]` int64, or all: `[n, in]` float32, the values that gguf's own `dequantize` gives. On `meta`
        too.
        """
        rows = self.rows if ids is None else self.rows[ids]
        if self.kind in (INT8, FLOAT8):
            return dequantize(self.kind, rows)
        import gguf

        if rows.is_meta:
            return torch.empty(len(rows), self.shape[1], dtype=torch.float32, device="meta")
        values: np.ndarray[Any, Any] = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[self.kind])
        return torch.from_numpy(values)


Matrix = Tensor | BlockMatrix
"""A tensor `[out, in]` of any float type, or blocks."""


def stack(parts: Sequence[Matrix]) -> Matrix:
    """One matrix of the rows of all `parts`, which have the same inputs. Parts of unlike types become float32."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, BlockMatrix) and all(
        isinstance(each, BlockMatrix) and each.kind == first.kind for each in parts
    ):
        rows = torch.cat([each.rows for each in parts if isinstance(each, BlockMatrix)])
        return BlockMatrix(first.kind, rows, (len(rows), first.shape[1]))
    dense = [dense_of(each) for each in parts]
    same = all(each.dtype is dense[0].dtype for each in dense)
    return torch.cat(dense if same else [each.float() for each in dense])


def split(matrix: Matrix, rows: int | list[int]) -> list[Matrix]:
    """The matrix in parts of `rows` rows, the last of which may have fewer, or of so many each: views of it."""
    if isinstance(matrix, BlockMatrix):
        parts = matrix.rows.split(rows)
        return [BlockMatrix(matrix.kind, part, (len(part), matrix.shape[1])) for part in parts]
    return list(matrix.split(rows))


def stored_rows(matrix: Matrix) -> Tensor:
    """What the matrix is kept as, row by row: its own elements, or the bytes of its blocks."""
    return matrix.rows if isinstance(matrix, BlockMatrix) else matrix


def numbers_of(matrix: Matrix, rows: Tensor) -> Tensor:
    """The values of some `stored_rows` of the matrix, `[n, in]`: blocks as float32, others as they are."""
    if isinstance(matrix, BlockMatrix):
        return BlockMatrix(matrix.kind, rows, (len(rows), matrix.shape[1])).dequantize()
    return rows


def look_up(matrix: Matrix, ids: Tensor) -> Tensor:
    """Rows `ids` `[n]` int64 of the matrix, `[n, in]`, in a tensor of their own; types as `dense_of` has them."""
    return matrix.dequantize(ids) if isinstance(matrix, BlockMatrix) else F.embedding(ids, matrix)


def dense_of(matrix: Matrix) -> Tensor:
    """The matrix as one tensor `[out, in]`: blocks as float32, others as they are."""
    return matrix.dequantize() if isinstance(matrix, BlockMatrix) else matrix
