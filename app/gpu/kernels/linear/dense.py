"""Dense layers of PyTorch, and of a kernel in Triton with the same signature."""

import torch.nn.functional as F
from torch import Tensor

from app.gpu.kernels.linear.base import bias_of, cells
from app.gpu.kernels.linear.matrix import Matrix, dense_of


class DenseLinear:
    """`F.linear` on the weight as it came from the checkpoint, and our own product of a single row on CUDA."""

    def __init__(self, weight: Matrix, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weights = cells(dense_of(weight), bias)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda and len(x) == 1:
            from app.gpu.kernels.linear.cuda.triton_vector import matvec  # Triton is where CUDA is

            return matvec(x, self.weights[0].tensor, bias_of(self.weights))
        return F.linear(x, self.weights[0].tensor, bias_of(self.weights))


class TritonLinear:
    """Our own products on CUDA, in tiles of one size: a row's result has the same bits whatever rows are beside it."""

    def __init__(self, weight: Matrix, bias: Tensor | None = None) -> None:
        from app.gpu.kernels.linear.cuda.triton_matmul import matmul  # Triton is where CUDA is

        self._matmul = matmul
        self.out_features, self.in_features = weight.shape
        self.weights = cells(dense_of(weight), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._matmul(x, self.weights[0].tensor, bias_of(self.weights))
