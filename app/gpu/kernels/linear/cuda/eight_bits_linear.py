"""Dense layers of CUDA devices whose weights take 8 bits each."""

import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.kernels.linear.base import bias_of
from app.gpu.kernels.linear.eight_bits import FLOAT8_STEP, float8_parts, int8_parts
from app.gpu.kernels.linear.matrix import BlockMatrix
from app.gpu.kernels.linear.weight import Weight


class Int8Linear:
    """A weight of integers in blocks, which become the type of the inputs in registers: our own products, in tiles of
    one size. A row's result has the same bits whatever rows are beside it.
    """

    def __init__(self, weight: BlockMatrix, bias: Tensor | None = None) -> None:
        """`weight` is of kind `INT8`."""
        from app.gpu.kernels.linear.cuda.triton_int8 import matmul_int8  # Triton is where CUDA is

        self._matmul = matmul_int8
        self.out_features, self.in_features = weight.shape
        numbers, scales = int8_parts(weight.rows)
        self.weights = [Weight(numbers.flatten(1).contiguous()), Weight(scales.T.contiguous()), *_bias(bias)]

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales, *bias = self.weights
        return self._matmul(x, numbers.tensor, scales.tensor, bias_of([numbers, *bias]))


class Float8Linear:
    """A weight of float8 with a scale for each output. Inputs become float8 too, with a scale for each row, which
    depends on nothing but the row. Sums are float32.

    The products are PyTorch's, which chooses how to sum by the number of rows; with `batch_invariant` our own, in tiles
    of one size: a row's result has the same bits whatever rows are beside it.
    """

    def __init__(self, weight: BlockMatrix, bias: Tensor | None = None, *, batch_invariant: bool = False) -> None:
        """`weight` is of kind `FLOAT8`."""
        from app.gpu.kernels.linear.cuda.triton_float8 import matmul_float8, round_rows  # Triton is where CUDA is

        self._round = round_rows
        self._matmul = matmul_float8 if batch_invariant else _scaled_mm
        self.out_features, self.in_features = weight.shape
        # PyTorch's outputs are whole steps, as its inputs are.
        missing = -self.out_features % FLOAT8_STEP
        numbers, scales = float8_parts(F.pad(weight.rows, (0, 0, 0, missing)))
        padded = bias if bias is None else F.pad(bias, (0, missing))
        self.weights = [Weight(numbers.contiguous()), Weight(scales.contiguous()), *_bias(padded)]

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales, *bias = self.weights
        rows, row_scales = self._round(x)
        y = self._matmul(rows, row_scales, numbers.tensor, scales.tensor, bias_of([numbers, *bias]), x.dtype)
        return y if y.shape[1] == self.out_features else y[:, : self.out_features].contiguous()


def _scaled_mm(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See `matmul_float8`."""
    y: Tensor = torch._scaled_mm(x, weight.T, x_scales, scales.T, bias=bias, out_dtype=dtype)
    return y


def _bias(bias: Tensor | None) -> list[Weight]:
    return [] if bias is None else [Weight(bias)]
