"""Dense layers of float32 on a CPU, by kernels of our own, from weights that are cut into panels.

The weights keep the type that the checkpoint has them in, and become float32 as they are multiplied: a layer has the
bits of one whose weights were converted before.

Measured over the linears of a 135M Llama, AVX-512, two cores (`python -m benchmarks.kernels linear`), beside oneDNN on
weights in its blocked layout: 0.8 to 1.02 times the time at 1 to 256 rows. What oneDNN cannot do is why they are here:

- They multiply a weight that is still in a file, a part at a time while it is in a core's cache: a pass with streamed
  weights takes a third longer than one with resident ones, not more than twice as long (`python -m loadgen weights`).
- Each sum is made from its first term to its last, whatever else there is to do. So a row's bits do not depend on its
  company, nor on where the weight is.
"""

import torch
from torch import Tensor

from app.gpu.kernels.cpu.elementwise import add_, to_bfloat16
from app.gpu.kernels.linear.base import bias_of, cells
from app.gpu.kernels.linear.cpu.packing import PanelFormat, to_pairs, to_panels
from app.gpu.kernels.linear.cpu.panels import PanelShape, multiply, multiply_from_file
from app.gpu.kernels.linear.matrix import Matrix
from app.gpu.kernels.linear.weight import Weight


class PanelLinear:
    """A dense layer of a weight in panels."""

    def __init__(self, weight: Matrix, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        panels, format = self._cut(weight)
        self._shape = PanelShape(len(panels), self.in_features, format)
        self.weights = cells(panels, bias)

    def __call__(self, x: Tensor) -> Tensor:
        y = self._multiply(x, self.weights[0])
        if y.shape[1] > self.out_features:
            y = y[:, : self.out_features].contiguous()
        bias = bias_of(self.weights)
        return y if bias is None else add_(y, bias)

    def _cut(self, weight: Matrix) -> tuple[Tensor, PanelFormat]:
        return to_panels(weight)

    def _multiply(self, x: Tensor, weight: Weight) -> Tensor:
        """`[tokens, in_features]` to `[tokens, outputs of all panels]`."""
        place = weight.place
        if place is not None:
            y = multiply_from_file(x, place.file, place.offset, self._shape)
            if y is not None and place.is_intact():
                return y
        return multiply(x, weight.tensor, self._shape)


class PairLinear(PanelLinear):
    """A dense layer of float32 that is multiplied in bfloat16 and summed in float32. Inputs must be even.

    A row's bits do not depend on its company here either. An input is rounded to bfloat16 just before its product; what
    lies between products stays float32.
    """

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(to_bfloat16(x))

    def _cut(self, weight: Matrix) -> tuple[Tensor, PanelFormat]:
        return to_pairs(weight)


def multiply_in_bfloat16(weight: Matrix, bias: Tensor | None = None) -> PanelLinear:
    """A `PairLinear`, or a `PanelLinear` if the inputs are odd."""
    return PanelLinear(weight, bias) if weight.shape[1] % 2 else PairLinear(weight, bias)


def multiply_as_kept(weight: Matrix, bias: Tensor | None = None) -> PanelLinear:
    """As `multiply_in_bfloat16` for a weight in bfloat16, else a `PanelLinear`."""
    kept = isinstance(weight, Tensor) and weight.dtype is torch.bfloat16
    return multiply_in_bfloat16(weight, bias) if kept else PanelLinear(weight, bias)
