"""PyTorch's own dense layer."""

import torch.nn.functional as F
from torch import Tensor

from app.gpu.linear.base import tensor_of
from app.gpu.linear.weight import Weight


class DenseLinear:
    """`F.linear` on the weight as it came from the checkpoint."""

    def __init__(self, weight: Weight, bias: Weight | None = None) -> None:
        self.out_features, self.in_features = weight.tensor.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight.tensor, tensor_of(self._bias))
