"""The text segment as a model sees it: bundles that it is built from and runs with, tables that it looks rows up in.

A bundle is what the device needs of the weights at once: a layer, the final norm, some rows of the output projection. A
model makes its bundles in the order in which a pass uses them, and says when it uses one. Where the weights are in the
meantime is not its business: all on the device, or most of them on the host and on their way.
"""

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from app.gpu.kernels.linear.base import Linear
from app.gpu.kernels.linear.matrix import Matrix
from app.gpu.kernels.linear.weight import Weight


class Bundle(Protocol):
    """One bundle while the model is built. Everything that is given to it is part of it, in this order."""

    def hold(self, tensor: Tensor) -> Weight:
        """A dense tensor that the model computes with itself, such as a norm's weight."""
        ...

    def linear(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        """The dense layer of `weight` `[out, in]`, as the checkpoint has it, and `bias` `[out]`."""
        ...


class Table(Protocol):
    """A matrix of which a pass needs some rows."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` `[n]` int64, on the device, in a tensor of their own `[n, width]` of the text's dtype."""
        ...


class Text(Protocol):
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
