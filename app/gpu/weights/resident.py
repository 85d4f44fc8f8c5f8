"""Weights that are all on the device, and stay there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from app.gpu.kernels.linear import linear_maker
from app.gpu.kernels.linear.base import Linear, MakeLinear, Products
from app.gpu.kernels.linear.matrix import BlockMatrix, Matrix, look_up
from app.gpu.kernels.linear.weight import Weight

_HERE = nullcontext()


class ResidentText:
    """See `Text`. The tensors of which a model is built are kept as they are, or in a layout that multiplies faster."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        batch_invariant: bool,
        products: Products = Products.FLOAT32,
    ) -> None:
        self.device, self.dtype = device, dtype
        linear = linear_maker(device, dtype, streamed=False, batch_invariant=batch_invariant, products=products)
        self._bundle = nullcontext(_ResidentBundle(linear, device))

    def bundle(self) -> AbstractContextManager[_ResidentBundle]:
        return self._bundle

    def table(self, matrix: Matrix) -> _ResidentTable:
        return _ResidentTable(_on(self.device, matrix), self.dtype)

    def using(self, index: int) -> AbstractContextManager[None]:
        """See `Text.using`: they are always there."""
        return _HERE


class _ResidentBundle:
    """See `Bundle`."""

    def __init__(self, linear: MakeLinear, device: torch.device) -> None:
        self._make, self._device = linear, device

    def hold(self, tensor: Tensor) -> Weight:
        return Weight(tensor)

    def linear(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        return self._make(_on(self._device, weight), bias)


class _ResidentTable:
    """See `Table`."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype) -> None:
        self._matrix, self._dtype = matrix, dtype

    def rows(self, ids: Tensor) -> Tensor:
        return look_up(self._matrix, ids).to(self._dtype)


def _on(device: torch.device, matrix: Matrix) -> Matrix:
    """The matrix on `device`: blocks may have been made on the host."""
    if isinstance(matrix, BlockMatrix):
        return BlockMatrix(matrix.kind, matrix.rows.to(device), matrix.shape)
    return matrix
