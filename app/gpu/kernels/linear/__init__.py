"""Dense layers: which kind a device multiplies fastest, and keeps a row's bits where that is wanted."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.kernels.linear.base import BlockMatrix, Linear, MatmulPrecision, Matrix, Weight, dense_of
from app.gpu.kernels.linear.encodings import FLOAT8, FLOAT8_STEP, INT8, Grouped, float8_parts, int8_parts

MakeLinear = Callable[[Matrix, Tensor | None, int], Linear]
"""Makes the layer of a weight `[out, in]` and a bias `[out]`, which may be on `meta`. Or the layers of so many experts:
of `[experts * out, in]` and `[experts, out]`.
"""


def sums_rows_alike(device: torch.device, *, batch_invariant: bool) -> bool:
    """Whether layers of `linear_maker` give a row the same bits in any batch: panels do so by themselves."""
    return batch_invariant or device.type == "cpu"


def linear_maker(
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch_invariant: bool,
    products: MatmulPrecision = MatmulPrecision.FLOAT32,
) -> MakeLinear:
    """The fastest layers that compute in `dtype` on `device`, with the same bits whether weights stay there or are
    streamed to it. Weights of another type are converted when the layer is made, where it cannot multiply them. With
    `batch_invariant` layers give a row the same bits in any batch. `products` matters on a CPU.
    """
    if device.type == "cpu":
        from app.gpu.kernels.linear.panels import make_panels  # imports Numba, which only a CPU needs

        return partial(make_panels, dtype, products)
    return partial(DenseLinear, dtype=dtype, batch_invariant=batch_invariant)


class DenseLinear:
    """A dense layer on CUDA, and of PyTorch on any device. A weight becomes `dtype`, unless it has fewer bits:

    - In groups: codes become the type of the inputs in registers, in a kernel of ours. Experts become `dtype`.
    - `INT8`: integers become the type of the inputs in registers, in a kernel of ours.
    - `FLOAT8`: inputs become float8 too, with a scale for each row. Sums are float32. The products are PyTorch's.

    PyTorch chooses how to sum by the number of rows. With `batch_invariant` all products are our own, and those of
    experts always are.
    """

    def __init__(
        self,
        weight: Matrix,
        bias: Tensor | None = None,
        experts: int = 1,
        *,
        dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """Without `dtype` the weight keeps the type that `dense_of` gives it."""
        self.out_features, self.in_features = weight.shape[0] // experts, weight.shape[1]
        kind = weight.kind if isinstance(weight, BlockMatrix) else None
        self._multiply: Callable[..., Tensor] = _multiply_dense
        if batch_invariant or experts > 1 or kind in (INT8, FLOAT8):
            from app.gpu.kernels.linear.triton_matmul import matmul

            self._multiply = matmul
        if isinstance(weight, BlockMatrix) and isinstance(kind, Grouped) and experts == 1:
            from app.gpu.kernels.linear.triton_matmul import arrange_codes, grouped_matmul

            self._multiply = partial(grouped_matmul, kind)
            codes, *factors = kind.parts(weight.rows)
            tensors = [arrange_codes(kind, codes.flatten(1)), *(each.contiguous() for each in factors)]
        elif isinstance(weight, BlockMatrix) and kind == INT8:
            numbers, scales = int8_parts(weight.rows)
            tensors = [numbers.flatten(1).contiguous(), scales.T.contiguous()]
        elif isinstance(weight, BlockMatrix) and kind == FLOAT8:
            self._multiply = partial(_multiply_float8, batch_invariant or experts > 1)
            missing = -weight.shape[0] % FLOAT8_STEP  # PyTorch's outputs are whole steps, as its inputs are
            tensors = [each.contiguous() for each in float8_parts(F.pad(weight.rows, (0, 0, 0, missing)))]
            bias = bias if bias is None or experts > 1 else F.pad(bias, (0, missing))
        else:
            dense = dense_of(weight)
            tensors = [dense if dtype is None else dense.to(dtype)]
        self._factors = len(tensors) - 1
        self.weights = [Weight(each) for each in (*tensors, *(() if bias is None else (bias,)))]

    def __call__(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        rows, experts = (0, 0) if starts is None else (x.shape[0] * x.shape[1], len(starts) - 1)
        weight, *rest = (each.visited(rows, experts) for each in self.weights)
        factors = rest[: self._factors] if self._factors else (None,)
        bias = rest[self._factors] if len(rest) > self._factors else None
        if starts is not None:
            return self._multiply(x.flatten(0, 1), weight, bias, *factors, starts=starts).view(*x.shape[:2], -1)
        y = self._multiply(x, weight, bias, *factors)
        return y if y.shape[1] == self.out_features else y[:, : self.out_features].contiguous()


def _multiply_dense(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None) -> Tensor:
    if x.is_cuda and len(x) == 1:
        from app.gpu.kernels.linear.triton_matmul import matvec

        return matvec(x, weight, bias)
    return F.linear(x, weight, bias)


def _multiply_float8(
    own: bool, x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor, starts: Tensor | None = None
) -> Tensor:
    from app.gpu.kernels.linear.triton_matmul import matmul, round_rows

    rows, row_scales = round_rows(x)
    if own:
        return matmul(rows, weight, bias, scales, row_scales, x.dtype, starts=starts)
    return torch._scaled_mm(rows, weight.T, row_scales, scales.T, bias=bias, out_dtype=x.dtype)
