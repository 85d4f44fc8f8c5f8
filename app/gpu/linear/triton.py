"""Our own products on CUDA, made in tiles of one size."""

from torch import Tensor

from app.gpu.linear.base import tensor_of
from app.gpu.linear.weight import Weight


class TritonLinear:
    """A row's result has the same bits whatever rows are beside it."""

    def __init__(self, weight: Weight, bias: Weight | None = None) -> None:
        from app.gpu.linear.triton_matmul import matmul  # Triton is where CUDA is

        self._matmul = matmul
        self.out_features, self.in_features = weight.tensor.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._matmul(x, self._weight.tensor, tensor_of(self._bias))
