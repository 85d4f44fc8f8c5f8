"""Products whose rows do not depend on their company, of a library that chooses how to sum by the number of rows."""

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.kernels.linear.base import Linear, MakeLinear
from app.gpu.kernels.linear.matrix import Matrix, dense_of

TILE_ROWS = 16
"""Rows of every product. Measured over the linears of a 135M Llama, in float32, on two cores: 1.45 times the time of
the fastest layer for one row, 1.1 times for 16 and 1.5 times for 32."""


def tiled_maker(make: MakeLinear) -> MakeLinear:
    """Layers of `make` in tiles, as `TiledLinear` has it. Making one raises FieldOutOfRange where `make`'s do not treat
    the rows of a tile alike; each shape is tried once.
    """
    require_rows_alike = cache(partial(_require_rows_alike, make))

    def make_tiled(weight: Matrix, bias: Tensor | None = None) -> Linear:
        dense = dense_of(weight)
        require_rows_alike(tuple(dense.shape), dense.dtype)
        return TiledLinear(make(dense, bias))

    return make_tiled


class TiledLinear:
    """Another layer's products, always of `TILE_ROWS` rows, the last of them padded: a row's result has the same bits
    whatever rows are beside it, and wherever it is among them.
    """

    def __init__(self, linear: Linear) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weights = linear.weights
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], self.out_features)
        for first in range(0, x.shape[0], TILE_ROWS):
            rows = x[first : first + TILE_ROWS]
            count = rows.shape[0]
            padded = rows if count == TILE_ROWS else F.pad(rows, (0, 0, 0, TILE_ROWS - count))
            y[first : first + count] = self._linear(padded)[:count]
        return y


def _require_rows_alike(make: MakeLinear, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise FieldOutOfRange unless the result of every row of a tile is that of the same row one place further down.

    Values are our own: a weight that is streamed is not there yet, and how a library sums depends on shapes alone.
    """
    generator = torch.Generator().manual_seed(0)
    linear = make(torch.empty(shape, dtype=dtype).normal_(generator=generator))
    tile = torch.empty(TILE_ROWS, shape[1], dtype=dtype).normal_(generator=generator)
    moved = linear(F.pad(tile[:-1], (0, 0, 1, 0)))
    if not torch.equal(moved[1:], linear(tile)[:-1]):
        raise FieldOutOfRange(
            "batch_invariant: on this machine the result of a matrix product depends on where in it a row is",
            param="batch_invariant",
        )
