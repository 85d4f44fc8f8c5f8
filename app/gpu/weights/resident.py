"""Weights that are all on the device, and stay there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.linear import linear_maker
from app.gpu.linear.base import Linear, MakeLinear
from app.gpu.linear.weight import Weight

_HERE = nullcontext()


class ResidentText:
    """See `Text`. The tensors of which a model is built are kept as they are, or in a layout that multiplies faster."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, batch_invariant: bool) -> None:
        self.device, self.dtype = device, dtype
        linear = linear_maker(device, dtype, streamed=False, batch_invariant=batch_invariant)
        self._bundle = nullcontext(_ResidentBundle(linear))

    def bundle(self) -> AbstractContextManager[_ResidentBundle]:
        return self._bundle

    def table(self, matrix: Tensor) -> _ResidentTable:
        return _ResidentTable(matrix)

    def using(self, index: int) -> AbstractContextManager[None]:
        """See `Text.using`: they are always there."""
        return _HERE


class _ResidentBundle:
    """See `Bundle`."""

    def __init__(self, linear: MakeLinear) -> None:
        self._make = linear

    def hold(self, tensor: Tensor) -> Weight:
        return Weight(tensor)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._make(Weight(weight), None if bias is None else Weight(bias))


class _ResidentTable:
    """See `Table`."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._matrix)
