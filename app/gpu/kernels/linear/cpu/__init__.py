"""Dense layers on a CPU, by kernels of our own, from weights that are cut into panels.

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

from app.gpu.kernels.cpu.elementwise import add_, rounded
from app.gpu.kernels.linear.base import Linear, MakeLinear, MatmulPrecision, Weight, bias_of, cells
from app.gpu.kernels.linear.cpu.formats import to_panels
from app.gpu.kernels.linear.cpu.products import PanelShape, multiply, multiply_from_file
from app.gpu.kernels.linear.matrix import Matrix, dense_of


class PanelLinear:
    """A dense layer of a weight in panels, which sums in float32. What it is given, and gives, has one float type.

    With `in_bfloat16` it multiplies in bfloat16; inputs must be even. An input is rounded to it just before its
    product; what lies between products keeps its type.
    """

    def __init__(self, weight: Matrix, bias: Tensor | None = None, *, in_bfloat16: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        panels, format = to_panels(weight, in_bfloat16=in_bfloat16)
        self._shape = PanelShape(len(panels), self.in_features, format)
        self.weights = cells(panels, bias)

    def __call__(self, x: Tensor) -> Tensor:
        y = self._multiply(x if x.dtype is self._shape.dtype else rounded(x, self._shape.dtype), self.weights[0])
        if y.shape[1] > self.out_features:
            y = y[:, : self.out_features].contiguous()
        bias = bias_of(self.weights)
        y = y if bias is None else add_(y, bias)
        return y if y.dtype is x.dtype else rounded(y, x.dtype)

    def _multiply(self, x: Tensor, weight: Weight) -> Tensor:
        """`[tokens, in_features]` to `[tokens, outputs of all panels]`."""
        place = weight.place
        if place is not None:
            y = multiply_from_file(x, place.file, place.offset, self._shape)
            if y is not None and place.is_intact():
                return y
        return multiply(x, weight.tensor, self._shape)


def panel_maker(dtype: torch.dtype, precision: MatmulPrecision) -> MakeLinear:
    """Layers of a model that computes in `dtype`. Those of a half type have weights of it."""

    def make(weight: Matrix, bias: Tensor | None = None) -> Linear:
        weight = weight if dtype is torch.float32 else dense_of(weight).to(dtype)
        kept = isinstance(weight, Tensor) and weight.dtype is torch.bfloat16
        wanted = precision is MatmulPrecision.BFLOAT16 or (precision is MatmulPrecision.AS_KEPT and kept)
        return PanelLinear(weight, bias, in_bfloat16=wanted and weight.shape[1] % 2 == 0)

    return make
