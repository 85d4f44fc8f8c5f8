"""Dense layers `y = x W^T + b`, with the weight held in whichever layout the device multiplies fastest.

On CPUs the weight is reordered once into oneDNN's blocked layout. Measured over the linears of a 135M Llama on an
AVX-512 machine (`python -m benchmarks.kernels linear`), the reordered weight is faster than `F.linear` at every row
count, one row included, so it is the only copy that is kept: about 2x up to 64 rows, 1.2x at 1,000. The price is an
output projection that is tied to the embedding: its rows are looked up as well, so there it is a second copy.

Libraries choose how to sum by the number of rows, so a row's last bits depend on its company. Where that may not be,
every product is made in tiles of one size.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from app.errors import FieldOutOfRange


class Linear(Protocol):
    """A dense layer. `bytes` is what its tensors occupy."""

    in_features: int
    out_features: int
    bytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """`[tokens, in_features]` to `[tokens, out_features]`, both in the dtype of the weight."""
        ...


class DenseLinear:
    """`F.linear` on the weight as it came from the checkpoint."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """oneDNN on a weight in its blocked layout; holds no other copy of the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._weight = torch.ops.mkldnn._reorder_linear_weight.default(weight)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._linear(x, self._weight, self._bias, "none", [], "")
        return y


TILE_ROWS = 16
"""Rows of a product on a CPU where all have as many. Measured over the linears of a 135M Llama, float32, on two cores:
1.45 times the time of the fastest layer for one row, 1.1 times for 16 and 1.5 times for 32."""


class TiledLinear:
    """Another layer's products, always of `TILE_ROWS` rows, the last of them padded: a row's result has the same bits
    whatever rows are beside it, and wherever it is among them.
    """

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        """Raises FieldOutOfRange where the library that multiplies does not treat the rows of a tile alike."""
        self.in_features, self.out_features, self.bytes = linear.in_features, linear.out_features, linear.bytes
        self._linear = linear
        self._prove(torch.randn(TILE_ROWS, self.in_features, generator=torch.Generator().manual_seed(0)).to(dtype))

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], self.out_features)
        for first in range(0, x.shape[0], TILE_ROWS):
            rows = x[first : first + TILE_ROWS]
            count = rows.shape[0]
            padded = rows if count == TILE_ROWS else F.pad(rows, (0, 0, 0, TILE_ROWS - count))
            y[first : first + count] = self._linear(padded)[:count]
        return y

    def _prove(self, tile: Tensor) -> None:
        """Compare the result of every row with that of the same row one place further down."""
        moved = self._linear(F.pad(tile[:-1], (0, 0, 1, 0)))
        if not torch.equal(moved[1:], self._linear(tile)[:-1]):
            raise FieldOutOfRange(
                "batch_invariant: on this machine the result of a matrix product depends on where in it a row is",
                param="batch_invariant",
            )


class TritonLinear:
    """Our own kernel, whose products are made in tiles of one size."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        from app.gpu.triton_linear import matmul  # Triton is where CUDA is

        self._matmul = matmul
        self.out_features, self.in_features = weight.shape
        self.bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._matmul(x, self._weight, self._bias)


class MakeLinear(Protocol):
    """How a model's dense layers are made."""

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The layer for `weight` `[out, in]` and `bias` `[out]`, on the device where they are."""
        ...


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """See `MakeLinear`: the fastest layer."""
    return PackedLinear(weight, bias) if _packs(weight) else DenseLinear(weight, bias)


def make_batch_invariant_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """See `MakeLinear`: a layer that gives a row the same bits in any batch."""
    if weight.is_cuda:
        return TritonLinear(weight, bias)
    return TiledLinear(make_linear(weight, bias), weight.dtype)


def _packs(weight: Tensor) -> bool:
    """Whether this machine's oneDNN multiplies this dtype in its blocked layout."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    match weight.dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        case _:
            return False
