"""Dense layers `y = x W^T + b`, with the weight held in whichever layout the device multiplies fastest.

On CPUs the weight is reordered once into oneDNN's blocked layout. Measured over the linears of a 135M Llama on an
AVX-512 machine (`python -m benchmarks.kernels linear`), the reordered weight is faster than `F.linear` at every row
count, one row included, so it is the only copy that is kept: about 2x up to 64 rows, 1.2x at 1,000. The price is an
output projection that is tied to the embedding: its rows are looked up as well, so there it is a second copy.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


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


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest layer for `weight` `[out, in]` and `bias` `[out]` on the device where they are."""
    return PackedLinear(weight, bias) if _packs(weight) else DenseLinear(weight, bias)


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
