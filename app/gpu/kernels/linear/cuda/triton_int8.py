"""A Triton kernel for products with a weight of 8-bit integers in blocks, each of which has a scale.

The integers become the type of the inputs in registers: exactly, as no type that a model computes in has fewer than 8
significant bits. The sum of each block is multiplied by the block's scale in float32. So what the weights stand for is
not rounded again. Tiles have one size, and blocks are summed from first to last, as in `triton_matmul`: a row has the
same bits alone and in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.gpu.kernels.linear.eight_bits import INT8_BLOCK

TILE_ROWS, TILE_OUTPUTS = 64, 64
STAGES = 4
"""Blocks in flight. The three sizes were chosen by reasoning, not tuned on a device."""


def matmul_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """`x` `[rows, inputs]` times a weight transposed, plus `bias` `[outputs]`: `[rows, outputs]`, all in bfloat16 or
    float16, the last axis of `x` dense. Of float32 Triton makes TF32 on some devices.

    `weight`: `[outputs, inputs]` int8; `scales`: `[inputs / 32, outputs]` float16; both dense. CUDA tensors, or CPU
    tensors in Triton's interpreter.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return y
    with torch.cuda.device_of(x):
        _matmul_int8[triton.cdiv(rows, TILE_ROWS), triton.cdiv(outputs, TILE_OUTPUTS)](
            x,
            weight,
            scales,
            scales if bias is None else bias,
            y,
            rows,
            x.stride(0),
            outputs=outputs,
            inputs=inputs,
            has_bias=bias is not None,
            tile_rows=TILE_ROWS,
            tile_outputs=TILE_OUTPUTS,
            block=INT8_BLOCK,
            num_warps=4,
            num_stages=STAGES,
        )
    return y


@triton.jit(do_not_specialize=["rows"])
def _matmul_int8(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program computes one tile of `y`, transposed: the weights are the left operand, which tensor cores take from
    registers.
    """
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows).to(tl.int64)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs).to(tl.int64)
    total = tl.zeros((tile_outputs, tile_rows), dtype=tl.float32)
    for index in range(inputs // block):
        step = index * block + tl.arange(0, block)
        numbers = tl.load(weight + output[:, None] * inputs + step[None, :], mask=output[:, None] < outputs, other=0)
        right = tl.load(x + row[None, :] * x_stride + step[:, None], mask=row[None, :] < rows, other=0.0)
        scale = tl.load(scales + index * outputs + output, mask=output < outputs, other=0.0).to(tl.float32)
        total += tl.dot(numbers.to(right.dtype), right, input_precision="ieee") * scale[:, None]
    if has_bias:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(
        y + row[None, :] * outputs + output[:, None],
        total.to(y.dtype.element_ty),
        mask=(row[None, :] < rows) & (output[:, None] < outputs),
    )
