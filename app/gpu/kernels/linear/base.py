"""Matrices as checkpoints have them, dense in any float type or in the quantized blocks of a GGUF file, and the dense
layers `y = x W^T + b` that multiply them.

A model that several ranks run is cut. Each has some heads of attention and some columns of the MLP (Shoeybi et al.,
arXiv:1909.08053): layers that give these cut their outputs, those that take them their inputs, and results are summed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.kernels.linear.encodings import FLOAT8, FLOAT8_STEP, INT8, Grouped, dequantize


class MatmulPrecision(Enum):
    """In which type inputs meet weights. All is summed in float32."""

    FLOAT32 = auto()
    AS_KEPT = auto()
    """bfloat16 for matrices that are kept in it, else float32."""
    BFLOAT16 = auto()


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where a tensor's bytes are, in an open file, before they have been brought to the tensor's memory."""

    file: int
    """The descriptor."""
    offset: int
    """Bytes from the file's start."""
    nbytes: int
    is_intact: Callable[[], bool]
    """Whether whatever has been read there until now is what was stored."""
    bring: Callable[[], Tensor]
    """Copies the bytes to the tensor's memory, and gives the tensor. Raises `WeightsLost`."""


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Where the tensors of experts are in pinned host memory, of which a GPU reads a few over the bus."""

    host: Tensor
    bring: Callable[[], Tensor]
    """Launches their copy to the device, all of them, and gives the tensor there."""


def expect(file: int, offset: int, nbytes: int) -> None:
    """Have the system begin to read that much of an open file from `offset` on, where it can be told so. Who reads it
    then waits for less.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, offset, nbytes, os.POSIX_FADV_WILLNEED)


class Weight:
    """A tensor that a model computes with. One that is streamed has a `tensor` only while its bundle is in use, or a
    `place`, whose bytes come to memory when the tensor is first read.
    """

    __slots__ = ("_tensor", "place")

    _tensor: Tensor
    place: FilePlace | HostPlace | None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def tensor(self) -> Tensor:
        """Raises AttributeError if it is nowhere, `WeightsLost` if it cannot be brought."""
        if self.place is not None:
            self.tensor = self.place.bring()
        return self._tensor

    @tensor.setter
    def tensor(self, tensor: Tensor) -> None:
        self._tensor, self.place = tensor, None

    @tensor.deleter
    def tensor(self) -> None:
        if self.place is None:
            del self._tensor
        self.place = None

    def visited(self, rows: int, experts: int) -> Tensor:
        """The tensor, of which so many rows visit some experts: where it is, if not nearly all of them can be."""
        place = self.place
        return place.host if isinstance(place, HostPlace) and rows < experts else self.tensor

    def expect(self, starts: Tensor) -> None:
        """Of experts in a file, have those read ahead that have rows: `starts` is as `Linear` has it."""
        if not isinstance(self.place, FilePlace):
            return
        size = self.place.nbytes // (len(starts) - 1)
        for expert, (begin, end) in enumerate(pairwise(starts.tolist())):
            if begin < end:
                expect(self.place.file, self.place.offset + expert * size, size)


class Linear(Protocol):
    """A dense layer, or those of several experts, all of one shape, whose weights are one below the other."""

    in_features: int
    out_features: int
    """Of each expert."""

    @property
    def weights(self) -> Sequence[Weight]:
        """The tensors that the layer computes with, dense, in the layout in which it multiplies. They may be moved."""

    def __call__(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """`[tokens, in_features]` to `[tokens, out_features]`, both in the dtype that the model computes in.

        Of experts: `[tokens, visits, in_features]` to `[tokens, visits, out_features]`. Of the rows of `x`, counted
        over both axes, expert `i` has `[starts[i], starts[i + 1])`; `starts` is `[experts + 1]` int32.
        """


_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), slice(0, 1)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), slice(0, 1)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), slice(0, 2)),
    "Q2_K": slice(40, 42),
    "Q3_K": slice(54, 55),
    "Q6_K": slice(104, 105),
    "TQ1_0": slice(26, 27),
    "TQ2_0": slice(32, 33),
}
"""By gguf's kind, where in a block its scale and its offset are, counted in float16."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockMatrix:
    """A matrix `[out, in]` of which each row is a run of quantized blocks.

    `kind` is `Grouped`, or `FLOAT8`, or the name of its type in gguf's `GGMLQuantizationType`, such as "Q4_1". `rows`
    is `[out, bytes of a row]` uint8, on the host; those of 8 bits and of groups may be on any device.
    """

    kind: str | Grouped
    rows: Tensor
    shape: tuple[int, int]

    @property
    def scales(self) -> Tensor:
        """The scales and offsets of the blocks, as a view in their stored type. The matrix is finite if they are, but
        MXFP4 may overflow. Kinds that keep scales in another way give all their values, float32. Works on `meta` too.
        """
        if isinstance(self.kind, Grouped):
            return self.kind.parts(self.rows)[1]
        if self.kind == "MXFP4":
            blocks: Tensor = self.rows.unflatten(1, (-1, 17))
            return blocks[:, :, 0].view(torch.float8_e8m0fnu)
        if self.kind not in _HALVES:
            return self.dequantize()
        import gguf

        _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind]]
        blocks = self.rows.view(torch.float16).unflatten(1, (-1, nbytes // 2))
        return blocks[:, :, _HALVES[self.kind]]

    def dequantize(self, ids: Tensor | None = None) -> Tensor:
        """Rows `ids` `[n]` int64, or all: `[n, in]` float32, as gguf's own `dequantize` gives them. On `meta` too."""
        rows = self.rows if ids is None else self.rows[ids]
        if rows.is_meta:
            return torch.empty(len(rows), self.shape[1], dtype=torch.float32, device="meta")
        if isinstance(self.kind, Grouped):
            return self.kind.dequantize(rows)
        if self.kind in (INT8, FLOAT8):
            return dequantize(self.kind, rows)
        import gguf

        values: np.ndarray[Any, Any] = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[self.kind])
        return torch.from_numpy(values)


Matrix = Tensor | BlockMatrix
"""A tensor `[out, in]` of any float type, or blocks."""


def stack(parts: Sequence[Matrix]) -> Matrix:
    """One matrix of the rows of all `parts`, which have the same inputs. Parts of unlike types become float32."""
    if len(parts) == 1:
        return parts[0]
    if len({each.kind if isinstance(each, BlockMatrix) else each.dtype for each in parts}) == 1:
        return _like(parts[0], _join([stored_rows(each) for each in parts]))
    return _join([dense_of(each).float() for each in parts])


def _join(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all. On `meta`, `torch.cat` imports PyTorch's compiler, which takes a second."""
    if parts[0].is_meta:
        return parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    return torch.cat(list(parts))


def with_rows(matrix: Matrix, rows: int) -> Matrix:
    """The matrix with zeros below it, up to so many rows: blocks of zeros stand for zeros."""
    stored = stored_rows(matrix)
    return _like(matrix, _join([stored, stored.new_zeros(rows - len(stored), *stored.shape[1:])]))


def pick_rows(matrix: Matrix, ids: Tensor) -> Matrix:
    """Rows `ids` `[n]` int64, on the host, of the matrix, as they are stored."""
    stored = stored_rows(matrix)
    return _like(matrix, stored.new_empty(len(ids), *stored.shape[1:]) if stored.is_meta else stored[ids])


def split(matrix: Matrix, rows: int | list[int]) -> list[Matrix]:
    """The matrix in parts of `rows` rows, the last of which may have fewer, or of so many each: views of it."""
    return [_like(matrix, part) for part in stored_rows(matrix).split(rows)]


def stored_rows(matrix: Matrix) -> Tensor:
    """What the matrix is kept as, row by row: its own elements, or the bytes of its blocks."""
    return matrix.rows if isinstance(matrix, BlockMatrix) else matrix


def numbers_of(matrix: Matrix, rows: Tensor) -> Tensor:
    """The values of some `stored_rows` of the matrix, `[n, in]`: blocks as float32, others as they are."""
    return dense_of(_like(matrix, rows))


def _like(matrix: Matrix, rows: Tensor) -> Matrix:
    """A matrix of that type, which is kept as `rows`."""
    if isinstance(matrix, BlockMatrix):
        return BlockMatrix(matrix.kind, rows, (len(rows), matrix.shape[1]))
    return rows


def look_up(matrix: Matrix, ids: Tensor) -> Tensor:
    """Rows `ids` `[n]` int64 of the matrix, `[n, in]`, in a tensor of their own; types as `dense_of` has them."""
    return matrix.dequantize(ids) if isinstance(matrix, BlockMatrix) else F.embedding(ids, matrix)


def dense_of(matrix: Matrix) -> Tensor:
    """The matrix as one tensor `[out, in]`: blocks as float32, others as they are."""
    return matrix.dequantize() if isinstance(matrix, BlockMatrix) else matrix


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `ranks` equal ones. All together sum `[tokens, features]` in `total`, in a new tensor; `beside`
    gives rank 0 the logits `[rows, vocab_size]` of those for each rank's `vocabulary`, and that size.
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

    def _part_of(self, matrix: Matrix, length: int) -> Matrix:
        """A copy of this rank's `length` rows, so that the whole is not kept."""
        return _like(matrix, stored_rows(matrix).split(length)[self.rank].clone())

    def _columns_of(self, rows: Tensor) -> Tensor:
        return rows.chunk(self.ranks, dim=1)[self.rank].clone(memory_format=torch.contiguous_format)


WHOLE = Shard()
"""Of a model that one process runs."""


def _block_length(kind: str | Grouped) -> int:
    """Inputs of a matrix in blocks are a multiple of this."""
    if isinstance(kind, Grouped):
        return kind.inputs
    if kind == FLOAT8:
        return FLOAT8_STEP
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
