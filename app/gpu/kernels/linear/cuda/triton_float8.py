"""Triton kernels for products in float8: rounding rows, and a product in which no row depends on how many others there
are. See `triton_matmul` for the latter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.gpu.kernels.linear.cuda.triton_rounding import encode, inverse, magnitude, scale_bits

TILE_ROWS, TILE_OUTPUTS, TILE_INPUTS = 64, 64, 128
STAGES = 4
"""Tiles in flight: 64 KiB of shared memory."""
ROW_TILE = 2048
"""Numbers of a row that are rounded at a time."""


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` `[rows, inputs]` of any float type, the last axis dense, as `[rows, inputs]` float8_e4m3fn and the scales of
    the rows `[rows, 1]` float32, as `float8.round_to_float8` has them.
    """
    rows, inputs = x.shape
    numbers = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        tile = min(ROW_TILE, triton.next_power_of_2(inputs))
        with torch.cuda.device_of(x):
            _round_rows[(rows,)](x, numbers.view(torch.uint8), scales, x.stride(0), inputs=inputs, tile=tile)
    return numbers, scales


@triton.jit
def _round_rows(
    x: tl.tensor, numbers: tl.tensor, scales: tl.tensor, x_stride: tl.tensor, inputs: tl.constexpr, tile: tl.constexpr
) -> None:
    """One program rounds one row."""
    row = tl.program_id(0).to(tl.int64)
    peaks = tl.zeros((tile,), dtype=tl.int32)
    for first in range(0, inputs, tile):
        at = first + tl.arange(0, tile)
        values = tl.load(x + row * x_stride + at, mask=at < inputs, other=0.0).to(tl.float32)
        peaks = tl.maximum(peaks, magnitude(values))
    bits = scale_bits(tl.max(peaks, 0))
    tl.store(scales + row, bits.to(tl.float32, bitcast=True))
    for first in range(0, inputs, tile):
        at = first + tl.arange(0, tile)
        values = tl.load(x + row * x_stride + at, mask=at < inputs, other=0.0).to(tl.float32)
        tl.store(numbers + row * inputs + at, encode(values * inverse(bits)), mask=at < inputs)


def matmul_float8(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`x` `[rows, inputs]` times `weight` `[outputs, inputs]` transposed, each number times its row's scale, plus
    `bias` `[outputs]`: `[rows, outputs]` of `dtype`.

    `x` and `weight` are float8_e4m3fn, dense; `x_scales` `[rows, 1]` and `scales` `[outputs, 1]` float32.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    y = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if not rows:
        return y
    with torch.cuda.device_of(x):
        _matmul_float8[triton.cdiv(rows, TILE_ROWS), triton.cdiv(outputs, TILE_OUTPUTS)](
            x,
            x_scales,
            weight,
            scales,
            scales if bias is None else bias,
            y,
            rows,
            outputs=outputs,
            inputs=inputs,
            has_bias=bias is not None,
            tile_rows=TILE_ROWS,
            tile_outputs=TILE_OUTPUTS,
            tile_inputs=TILE_INPUTS,
            num_warps=4,
            num_stages=STAGES,
        )
    return y


@triton.jit(do_not_specialize=["rows"])
def _matmul_float8(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
) -> None:
    """One program computes one tile `[tile_rows, tile_outputs]` of `y`.

    Hopper's tensor cores sum float8 in fewer bits than float32 has: so the sum of each tile is added in registers.
    """
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows).to(tl.int64)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs).to(tl.int64)
    total = tl.zeros((tile_rows, tile_outputs), dtype=tl.float32)
    for first in range(0, inputs, tile_inputs):
        step = first + tl.arange(0, tile_inputs)
        left = tl.load(
            x + row[:, None] * inputs + step[None, :],
            mask=(row[:, None] < rows) & (step[None, :] < inputs),
            other=0.0,
        )
        right = tl.load(
            weight + output[None, :] * inputs + step[:, None],
            mask=(output[None, :] < outputs) & (step[:, None] < inputs),
            other=0.0,
        )
        total = tl.dot(left, right, total, max_num_imprecise_acc=tile_inputs)
    total *= tl.load(x_scales + row, mask=row < rows, other=0.0)[:, None]
    total *= tl.load(scales + output, mask=output < outputs, other=0.0)[None, :]
    if has_bias:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + row[:, None] * outputs + output[None, :],
        total.to(y.dtype.element_ty),
        mask=(row[:, None] < rows) & (output[None, :] < outputs),
    )
