"""Weights as a model sees them, and those that are all on the device, and stay there.

A bundle is what the device needs of the weights at once: a layer, the final norm, some rows of the output projection. A
model makes its bundles in the order in which a pass uses them, and says when it uses one. Where the weights are in the
meantime is not its business: all on the device, or most of them on the host and on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from app.gpu.kernels.linear import linear_maker
from app.gpu.kernels.linear.base import Linear, MakeLinear, MatmulPrecision, Weight
from app.gpu.kernels.linear.matrix import BlockMatrix, Matrix, look_up

Table = Callable[[Tensor], Tensor]
"""A matrix of which a pass needs some rows: from `ids` `[n]` int64, on the device, to their rows in a tensor of their
own, `[n, width]` of the weights' dtype.
"""
_HERE = nullcontext()


class Bundle:
    """One bundle while the model is built. Everything that is given to it is part of it, in this order."""

    def __init__(self, linear: MakeLinear) -> None:
        self.weights: list[Weight] = []
        """The cells of all its tensors."""
        self._make = linear

    def hold(self, tensor: Tensor) -> Weight:
        """A dense tensor that the model computes with itself, such as a norm's weight."""
        weight = Weight(tensor)
        self.weights.append(weight)
        return weight

    def linear(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        """The dense layer of `weight` `[out, in]`, as the checkpoint has it, and `bias` `[out]`."""
        linear = self._make(weight, bias)
        self.weights += linear.weights
        return linear


class Weights(Protocol):
    """A model's weights. `dtype` and `device` are those that it computes in and on."""

    dtype: torch.dtype
    device: torch.device

    def bundle(self) -> AbstractContextManager[Bundle]:
        """The next bundle; it is complete when the context ends. The first one made has index 0."""
        ...

    def table(self, matrix: Matrix) -> Table:
        """A table of the rows of `matrix` `[n, width]`, which are kept as the checkpoint has them."""
        ...

    def using(self, index: int) -> AbstractContextManager[None]:
        """Within this context the weights of bundle `index` are on the device; what is launched in it may use them.

        One bundle at a time. Raises `WeightsLost` if it cannot be brought there; using a weight may, too.
        """
        ...


class ResidentWeights:
    """The tensors of which a model is built are kept as they are, or in a layout that multiplies faster."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        batch_invariant: bool,
        products: MatmulPrecision = MatmulPrecision.FLOAT32,
    ) -> None:
        self.device, self.dtype = device, dtype
        self._linear = linear_maker(device, dtype, batch_invariant=batch_invariant, products=products)

    def bundle(self) -> AbstractContextManager[Bundle]:
        return nullcontext(Bundle(lambda weight, bias=None: self._linear(self._here(weight), bias)))

    def table(self, matrix: Matrix) -> Table:
        here = self._here(matrix)
        return lambda ids: look_up(here, ids).to(self.dtype)

    def using(self, index: int) -> AbstractContextManager[None]:
        return _HERE

    def _here(self, matrix: Matrix) -> Matrix:
        """The matrix on the device: blocks may have been made on the host."""
        if isinstance(matrix, BlockMatrix):
            return BlockMatrix(matrix.kind, matrix.rows.to(self.device), matrix.shape)
        return matrix
