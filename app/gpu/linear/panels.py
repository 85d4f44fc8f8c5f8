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

from torch import Tensor

from app.gpu.cpu.elementwise import add_
from app.gpu.linear.base import bias_of, cells
from app.gpu.linear.cpu_panels import PanelShape, multiply, multiply_from_file
from app.gpu.linear.matrix import Matrix
from app.gpu.linear.packing import to_panels
from app.gpu.linear.weight import Weight


class PanelLinear:
    """A dense layer of a weight in panels."""

    def __init__(self, weight: Matrix, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        panels, format = to_panels(weight)
        self._shape = PanelShape(len(panels), self.in_features, format)
        self.weights = cells(panels, bias)

    def __call__(self, x: Tensor) -> Tensor:
        y = self._multiply(x, self.weights[0])
        if y.shape[1] > self.out_features:
            y = y[:, : self.out_features].contiguous()
        bias = bias_of(self.weights)
        return y if bias is None else add_(y, bias)

    def _multiply(self, x: Tensor, weight: Weight) -> Tensor:
        """`[tokens, in_features]` to `[tokens, outputs of all panels]`."""
        place = weight.place
        if place is not None:
            y = multiply_from_file(x, place.file, place.offset, self._shape)
            if y is not None and place.is_intact():
                return y
        return multiply(x, weight.tensor, self._shape)
