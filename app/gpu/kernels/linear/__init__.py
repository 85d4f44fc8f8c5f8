"""Dense layers: which kind a device multiplies fastest, and keeps a row's bits where that is wanted."""

from functools import partial

import torch
from torch import Tensor

from app.gpu.kernels.linear.base import Linear, MakeLinear, MatmulPrecision
from app.gpu.kernels.linear.eight_bits import FLOAT8, INT8
from app.gpu.kernels.linear.layers import DenseLinear, Float8Linear, TritonLinear
from app.gpu.kernels.linear.matrix import BlockMatrix, Matrix, dense_of


def sums_rows_alike(device: torch.device, *, batch_invariant: bool) -> bool:
    """Whether layers of `linear_maker` give a row the same bits in any batch: panels do so by themselves."""
    return batch_invariant or device.type == "cpu"


def linear_maker(
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch_invariant: bool,
    products: MatmulPrecision = MatmulPrecision.FLOAT32,
) -> MakeLinear:
    """The fastest layers that compute in `dtype` on `device`, with the same bits whether weights stay there or are
    streamed to it. Weights of another type are multiplied as they are where the layers can, and converted when the
    layer is made where they cannot.

    With `batch_invariant` they give a row the same bits in any batch. `products` matters on a CPU.
    """
    if device.type == "cuda":
        return partial(_make_on_cuda, dtype, batch_invariant)
    if device.type == "cpu":
        from app.gpu.kernels.linear.cpu import panel_maker  # imports Numba, which only a CPU needs

        return panel_maker(dtype, products)
    return partial(_convert, DenseLinear, dtype)


def _make_on_cuda(dtype: torch.dtype, batch_invariant: bool, weight: Matrix, bias: Tensor | None = None) -> Linear:
    """The layer of `weight`: as `dtype`, unless it is in blocks of 8 bits."""
    if isinstance(weight, BlockMatrix) and weight.kind == INT8:
        return TritonLinear(weight, bias)
    if isinstance(weight, BlockMatrix) and weight.kind == FLOAT8:
        return Float8Linear(weight, bias, batch_invariant=batch_invariant)
    return _convert(TritonLinear if batch_invariant else DenseLinear, dtype, weight, bias)


def _convert(make: MakeLinear, dtype: torch.dtype, weight: Matrix, bias: Tensor | None = None) -> Linear:
    """The layer of `weight` as `dtype`, where the bias is."""
    return make(dense_of(weight).to(dtype), bias)
