"""Dense layers: which kind a device multiplies fastest, and keeps a row's bits where that is asked for."""

from functools import partial

import torch
from torch import Tensor

from app.gpu.kernels.linear.base import Linear, MakeLinear, Products
from app.gpu.kernels.linear.cpu.onednn import PackedLinear, StoredLinear, onednn_multiplies
from app.gpu.kernels.linear.cuda.eight_bits_linear import Float8Linear, Int8Linear
from app.gpu.kernels.linear.dense import DenseLinear, TritonLinear
from app.gpu.kernels.linear.eight_bits import FLOAT8, INT8
from app.gpu.kernels.linear.matrix import BlockMatrix, Matrix, dense_of
from app.gpu.kernels.linear.tiled import tiled_maker


def sums_rows_alike(device: torch.device, dtype: torch.dtype, *, batch_invariant: bool) -> bool:
    """Whether layers of `linear_maker` give a row the same bits in any batch: panels do so by themselves."""
    return batch_invariant or (device.type == "cpu" and dtype is torch.float32)


def linear_maker(
    device: torch.device,
    dtype: torch.dtype,
    *,
    streamed: bool,
    batch_invariant: bool,
    products: Products = Products.FLOAT32,
) -> MakeLinear:
    """The fastest layers that compute in `dtype` with weights that stay on `device`, or are `streamed` to it. Their
    results have the same bits in either case. Weights of another type are multiplied as they are where the layers can,
    and converted when the layer is made where they cannot.

    With `batch_invariant` they give a row the same bits in any batch; making one raises FieldOutOfRange where that
    cannot be. `products` matters on a CPU that computes in float32.
    """
    if device.type == "cuda":
        return partial(_make_on_cuda, dtype, batch_invariant)
    if dtype is torch.float32:
        # They import Numba, which only a CPU needs.
        from app.gpu.kernels.linear.cpu.layers import PanelLinear, multiply_as_kept, multiply_in_bfloat16

        match products:
            case Products.FLOAT32:
                return PanelLinear
            case Products.AS_KEPT:
                return multiply_as_kept
            case Products.BFLOAT16:
                return multiply_in_bfloat16
    fastest: MakeLinear = DenseLinear
    if onednn_multiplies(dtype):
        fastest = StoredLinear if streamed else PackedLinear
    return partial(_convert, tiled_maker(fastest) if batch_invariant else fastest, dtype)


def _make_on_cuda(dtype: torch.dtype, batch_invariant: bool, weight: Matrix, bias: Tensor | None = None) -> Linear:
    """The layer of `weight`: as `dtype`, unless it is in blocks of 8 bits."""
    if isinstance(weight, BlockMatrix) and weight.kind == INT8:
        return Int8Linear(weight, bias)
    if isinstance(weight, BlockMatrix) and weight.kind == FLOAT8:
        return Float8Linear(weight, bias, batch_invariant=batch_invariant)
    return _convert(TritonLinear if batch_invariant else DenseLinear, dtype, weight, bias)


def _convert(make: MakeLinear, dtype: torch.dtype, weight: Matrix, bias: Tensor | None = None) -> Linear:
    """The layer of `weight` as `dtype`, where the bias is."""
    return make(dense_of(weight).to(dtype), bias)
