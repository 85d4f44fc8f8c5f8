"""The cell in which a model finds a tensor that it computes with."""

from __future__ import annotations

from torch import Tensor


class Weight:
    """A tensor that a model computes with. One that is streamed has a `tensor` only while its bundle is in use."""

    __slots__ = ("tensor",)

    tensor: Tensor

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
