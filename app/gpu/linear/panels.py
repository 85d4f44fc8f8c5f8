"""Dense layers of float32 on a CPU, by kernels of our own, from weights that are cut into panels.

Measured over the linears of a 135M Llama, AVX-512, two cores (`python -m benchmarks.kernels linear`), beside oneDNN on
weights in its blocked layout: 0.8 to 1.02 times the time at 1 to 256 rows. What oneDNN cannot do is why they are here:

- They multiply a weight that is still in a file, a part at a time while it is in a core's cache: a pass with streamed
  weights takes a third longer than one with resident ones, not more than twice as long (`python -m loadgen weights`).
- Each sum is made from its first term to its last, whatever else there is to do. So a row's bits do not depend on its
  company, nor on where the weight is.
"""

import torch.nn.functional as F
from torch import Tensor

from app.gpu.linear.base import tensor_of
from app.gpu.linear.cpu_panels import PanelShape, multiply, multiply_from_file
from app.gpu.linear.cpu_tile import PANEL
from app.gpu.linear.weight import Weight


class PanelLinear:
    """A dense layer of a weight in panels."""

    def __init__(self, weight: Weight, bias: Weight | None = None) -> None:
        self.out_features, self.in_features = weight.tensor.shape
        weight.tensor = to_panels(weight.tensor)
        self._shape = PanelShape(*weight.tensor.shape[:2])
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y = self._multiply(x)
        if y.shape[1] > self.out_features:
            y = y[:, : self.out_features].contiguous()
        bias = tensor_of(self._bias)
        return y if bias is None else y.add_(bias)

    def _multiply(self, x: Tensor) -> Tensor:
        """`[tokens, in_features]` to `[tokens, outputs of all panels]`."""
        place = self._weight.place
        if place is not None:
            y = multiply_from_file(x, place.file, place.offset, self._shape)
            if y is not None and place.is_intact():
                return y
        return multiply(x, self._weight.tensor, self._shape)


def to_panels(weight: Tensor) -> Tensor:
    """`weight` `[out, in]` as `[panels, in, PANEL]`: `PANEL` outputs each, of the last panel zeros where there are
    fewer. Also on `meta`.
    """
    outputs, inputs = weight.shape
    padded = F.pad(weight, (0, 0, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, inputs).transpose(1, 2).contiguous()
