"""A bundle whose weights are there, or have their shapes, only while the model is built."""

from __future__ import annotations

from torch import Tensor

from app.gpu.linear.base import Linear, MakeLinear
from app.gpu.weights.weight import Weight


class StreamedBundle:
    """See `Bundle`."""

    def __init__(self, linear: MakeLinear) -> None:
        """`linear` makes layers whose weights come and go."""
        self.weights: list[Weight] = []
        """In the order in which they were given; what becomes of them once the bundle is complete is the text's
        business.
        """
        self._make = linear

    def hold(self, tensor: Tensor) -> Weight:
        """See `Bundle.hold`."""
        weight = Weight(tensor)
        self.weights.append(weight)
        return weight

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """See `Bundle.linear`."""
        return self._make(self.hold(weight), None if bias is None else self.hold(bias))
