"""Dense layers of PyTorch, and of our kernels in Triton, which are imported where a layer is made: with CUDA."""

import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.kernels.linear.base import Weight, bias_of, cells
from app.gpu.kernels.linear.eight_bits import FLOAT8_STEP, float8_parts, int8_parts
from app.gpu.kernels.linear.matrix import BlockMatrix, Matrix, dense_of


class DenseLinear:
    """`F.linear` on the weight as it came from the checkpoint, and our own product of a single row on CUDA."""

    def __init__(self, weight: Matrix, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weights = cells(dense_of(weight), bias)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda and len(x) == 1:
            from app.gpu.kernels.linear.triton_matmul import matvec

            return matvec(x, self.weights[0].tensor, bias_of(self.weights))
        return F.linear(x, self.weights[0].tensor, bias_of(self.weights))


class TritonLinear:
    """Our own products on CUDA, in tiles of one size: a row's result has the same bits whatever rows are beside it.
    Integers in blocks become the type of the inputs in registers.
    """

    def __init__(self, weight: Matrix, bias: Tensor | None = None) -> None:
        """Blocks are of kind `INT8`."""
        from app.gpu.kernels.linear.triton_matmul import matmul

        self._matmul, self._in_blocks = matmul, isinstance(weight, BlockMatrix)
        self.out_features, self.in_features = weight.shape
        if isinstance(weight, BlockMatrix):
            numbers, scales = int8_parts(weight.rows)
            self.weights = cells(numbers.flatten(1).contiguous(), bias)
            self.weights.insert(1, Weight(scales.T.contiguous()))
        else:
            self.weights = cells(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        weight, *rest = self.weights
        if self._in_blocks:
            return self._matmul(x, weight.tensor, bias_of(rest), rest[0].tensor)
        return self._matmul(x, weight.tensor, bias_of(self.weights))


class Float8Linear:
    """A weight of float8 with a scale for each output. Inputs become float8 too, with a scale for each row, which
    depends on nothing but the row. Sums are float32.

    The products are PyTorch's, which chooses how to sum by the number of rows; with `batch_invariant` our own, in tiles
    of one size: a row's result has the same bits whatever rows are beside it.
    """

    def __init__(self, weight: BlockMatrix, bias: Tensor | None = None, *, batch_invariant: bool = False) -> None:
        """`weight` is of kind `FLOAT8`."""
        from app.gpu.kernels.linear.triton_float8 import round_rows
        from app.gpu.kernels.linear.triton_matmul import matmul

        self._round, self._matmul = round_rows, matmul if batch_invariant else None
        self.out_features, self.in_features = weight.shape
        # PyTorch's outputs are whole steps, as its inputs are.
        missing = -self.out_features % FLOAT8_STEP
        numbers, scales = float8_parts(F.pad(weight.rows, (0, 0, 0, missing)))
        self.weights = cells(numbers.contiguous(), None if bias is None else F.pad(bias, (0, missing)))
        self.weights.insert(1, Weight(scales.contiguous()))

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales, bias = self.weights[0].tensor, self.weights[1].tensor, bias_of(self.weights[1:])
        rows, row_scales = self._round(x)
        if self._matmul is not None:
            y = self._matmul(rows, numbers, bias, scales, row_scales, x.dtype)
        else:
            y = torch._scaled_mm(rows, numbers.T, row_scales, scales.T, bias=bias, out_dtype=x.dtype)
        return y if y.shape[1] == self.out_features else y[:, : self.out_features].contiguous()
