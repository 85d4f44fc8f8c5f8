"""oneDNN's products on a CPU, beside which ours are measured.

A weight that stays is reordered once into its blocked layout, and multiplied in three quarters of the time: measured in
bfloat16 over the linears of a 135M Llama on an AVX-512 machine, up to 16 rows (`python -m benchmarks.kernels linear`).
One that is streamed is multiplied as it is stored: reordering it each time would cost more than the product of a few
rows. oneDNN gives the same bits for either layout, but does not promise that; the tests check it for their
processor.
"""

import torch
from torch import Tensor

from app.gpu.kernels.linear.base import Matrix, Weight, dense_of


class StoredLinear:
    """oneDNN on a weight in the layout in which it is stored."""

    def __init__(self, weight: Matrix, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weights = [Weight(each) for each in (dense_of(weight), bias) if each is not None]
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        weight, *bias = (each.tensor for each in self.weights)
        y: Tensor = self._multiply(x, weight, bias[0] if bias else None, "none", [], "")
        return y


class PackedLinear(StoredLinear):
    """The same bits from a weight in oneDNN's blocked layout; there is no other copy of it."""

    def __init__(self, weight: Matrix, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.weights[0].tensor = torch.ops.mkldnn._reorder_linear_weight.default(self.weights[0].tensor)


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN multiplies the half type `dtype` in its blocked layout."""
    if not torch.backends.mkldnn.is_available():
        return False
    match dtype:
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        case _:
            return False
