"""Dense layers `y = x W^T + b`, with the weight held in whichever layout the device multiplies fastest.

On CPUs a weight that stays is reordered once into oneDNN's blocked layout. Measured over the linears of a 135M Llama on
an AVX-512 machine (`python -m benchmarks.kernels linear`), the reordered weight is faster than `F.linear` at every row
count, one row included, so it is the only copy that is kept: about 2x up to 64 rows, 1.2x at 1,000. The price is an
output projection that is tied to the embedding: its rows are looked up as well, so there it is a second copy.

A weight that is streamed is multiplied as it is stored, by the same kernels of oneDNN: reordering it each time would
cost more than the product of a few rows. They give the same bits for either layout, but for a single row in float32,
where they sum in another order. So that is multiplied as two, and where a weight lives never shows in a result. Nobody
promises that; the tests hold it for the processor that they run on.

Libraries choose how to sum by the number of rows, so a row's last bits depend on its company. Where that may not be,
every product is made in tiles of one size.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from app.errors import FieldOutOfRange
from app.gpu.weights.weight import Weight


class Linear(Protocol):
    """A dense layer."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """`[tokens, in_features]` to `[tokens, out_features]`, both in the dtype of the weight."""
        ...


class MakeLinear(Protocol):
    """How a model's dense layers are made."""

    def __call__(self, weight: Weight, bias: Weight | None = None) -> Linear:
        """The layer for `weight` `[out, in]` and `bias` `[out]`."""
        ...


def linear_maker(device: torch.device, dtype: torch.dtype, *, streamed: bool, batch_invariant: bool) -> MakeLinear:
    """The fastest layers for weights of `dtype` that stay on `device`, or are `streamed` to it: then a layer may be
    made while its weight is on `meta`.

    With `batch_invariant` they give a row the same bits in any batch; making one raises FieldOutOfRange where that
    cannot be.
    """
    if device.type == "cuda":
        return TritonLinear if batch_invariant else DenseLinear
    fastest: MakeLinear = DenseLinear
    if _onednn_multiplies(dtype):
        fastest = StoredLinear if streamed else PackedLinear
    return tiled_maker(fastest) if batch_invariant else fastest


def tiled_maker(make: MakeLinear) -> MakeLinear:
    """Layers of `make` in tiles, as `TiledLinear` has it. Making one raises FieldOutOfRange where `make`'s do not treat
    the rows of a tile alike; each shape is tried once.
    """
    require_rows_alike = cache(partial(_require_rows_alike, make))

    def make_tiled(weight: Weight, bias: Weight | None = None) -> Linear:
        require_rows_alike(tuple(weight.tensor.shape), weight.tensor.dtype)
        return TiledLinear(make(weight, bias))

    return make_tiled


class DenseLinear:
    """`F.linear` on the weight as it came from the checkpoint."""

    def __init__(self, weight: Weight, bias: Weight | None = None) -> None:
        self.out_features, self.in_features = weight.tensor.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight.tensor, _tensor(self._bias))


class StoredLinear:
    """oneDNN on a weight in the layout in which it is stored."""

    def __init__(self, weight: Weight, bias: Weight | None = None) -> None:
        self.out_features, self.in_features = weight.tensor.shape
        self._weight = weight
        self._bias = bias
        self._doubles_one = weight.tensor.dtype is torch.float32
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        doubled = self._doubles_one and x.shape[0] == 1
        rows = torch.cat((x, x)) if doubled else x
        y: Tensor = self._multiply(rows, self._weight.tensor, _tensor(self._bias), "none", [], "")
        return y[:1] if doubled else y


class PackedLinear(StoredLinear):
    """The same bits from a weight in oneDNN's blocked layout; holds no other copy of it."""

    def __init__(self, weight: Weight, bias: Weight | None = None) -> None:
        super().__init__(Weight(torch.ops.mkldnn._reorder_linear_weight.default(weight.tensor)), bias)


TILE_ROWS = 16
"""Rows of a product on a CPU where all have as many. Measured over the linears of a 135M Llama, float32, on two cores:
1.45 times the time of the fastest layer for one row, 1.1 times for 16 and 1.5 times for 32."""


class TiledLinear:
    """Another layer's products, always of `TILE_ROWS` rows, the last of them padded: a row's result has the same bits
    whatever rows are beside it, and wherever it is among them.
    """

    def __init__(self, linear: Linear) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], self.out_features)
        for first in range(0, x.shape[0], TILE_ROWS):
            rows = x[first : first + TILE_ROWS]
            count = rows.shape[0]
            padded = rows if count == TILE_ROWS else F.pad(rows, (0, 0, 0, TILE_ROWS - count))
            y[first : first + count] = self._linear(padded)[:count]
        return y


class TritonLinear:
    """Our own kernel, whose products are made in tiles of one size."""

    def __init__(self, weight: Weight, bias: Weight | None = None) -> None:
        from app.gpu.triton_linear import matmul  # Triton is where CUDA is

        self._matmul = matmul
        self.out_features, self.in_features = weight.tensor.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._matmul(x, self._weight.tensor, _tensor(self._bias))


def _tensor(weight: Weight | None) -> Tensor | None:
    return None if weight is None else weight.tensor


def _require_rows_alike(make: MakeLinear, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise FieldOutOfRange unless the result of every row of a tile is that of the same row one place further down.

    Values are our own: a weight that is streamed is not there yet, and how a library sums depends on shapes alone.
    """
    generator = torch.Generator().manual_seed(0)
    linear = make(Weight(torch.empty(shape, dtype=dtype).normal_(generator=generator)))
    tile = torch.empty(TILE_ROWS, shape[1], dtype=dtype).normal_(generator=generator)
    moved = linear(F.pad(tile[:-1], (0, 0, 1, 0)))
    if not torch.equal(moved[1:], linear(tile)[:-1]):
        raise FieldOutOfRange(
            "batch_invariant: on this machine the result of a matrix product depends on where in it a row is",
            param="batch_invariant",
        )


def _onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN multiplies `dtype` in its blocked layout."""
    if not torch.backends.mkldnn.is_available():
        return False
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        case _:
            return False
