"""A Triton kernel for matrix products in which no row depends on how many others there are.

cuBLAS picks its kernel, and with it the order of the sum over the inputs, by the number of rows. Here every product is
made of tiles of one size, each of them sums its inputs from first to last, and none is split between programs. So a row
has the same bits alone and in any batch, at any place in it (He, "Defeating Nondeterminism in LLM Inference", 2025).
This rests on tensor cores that treat the rows of a tile alike, which they do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS, TILE_OUTPUTS, TILE_INPUTS = 64, 64, 64
"""One size for every product. 64 rows are the fewest that Hopper's tensor cores take without waste; a decode step that
has fewer reads its weights once all the same, and those take longer than the sums."""


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` `[rows, inputs]` times `weight` `[outputs, inputs]` transposed, plus `bias` `[outputs]`: `[rows, outputs]`.

    All in one of float32, bfloat16 and float16, the last axis dense; sums are float32. CUDA tensors, or CPU tensors in
    Triton's interpreter.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return y
    with torch.cuda.device_of(x):
        _matmul[triton.cdiv(rows, TILE_ROWS), triton.cdiv(outputs, TILE_OUTPUTS)](
            x,
            weight,
            weight if bias is None else bias,
            y,
            rows,
            x.stride(0),
            weight.stride(0),
            outputs=outputs,
            inputs=inputs,
            has_bias=bias is not None,
            tile_rows=TILE_ROWS,
            tile_outputs=TILE_OUTPUTS,
            tile_inputs=TILE_INPUTS,
            num_warps=4,
            num_stages=8 // x.element_size(),  # tiles in flight: 64 KiB of shared memory
        )
    return y


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
) -> None:
    """One program computes one tile `[tile_rows, tile_outputs]` of `y`. Rows that share a tile of weights run side by
    side, so that it is read from memory once.

    `rows` is not specialised: a kernel of its own for one row, or for a multiple of 16, might sum in another order.
    """
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows).to(tl.int64)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs).to(tl.int64)
    total = tl.zeros((tile_rows, tile_outputs), dtype=tl.float32)
    for first in range(0, inputs, tile_inputs):
        step = first + tl.arange(0, tile_inputs)
        left = tl.load(
            x + row[:, None] * x_stride + step[None, :],
            mask=(row[:, None] < rows) & (step[None, :] < inputs),
            other=0.0,
        )
        right = tl.load(
            weight + output[None, :] * weight_stride + step[:, None],
            mask=(output[None, :] < outputs) & (step[:, None] < inputs),
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    if has_bias:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + row[:, None] * outputs + output[None, :],
        total.to(y.dtype.element_ty),
        mask=(row[:, None] < rows) & (output[None, :] < outputs),
    )
