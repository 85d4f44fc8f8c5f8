"""Triton kernels for products with a weight, dense or in groups: of any rows in tiles of one size, and of a single row.
And float8, bit for bit as `encodings` rounds to it: on devices that have no float8 too.

cuBLAS picks its kernel, and with it the order of the sum over the inputs, by the number of rows. In `matmul` every
product is made of tiles of one size, which sum their inputs from first to last. So a row has the same bits at any place
in any batch (He, "Defeating Nondeterminism in LLM Inference", 2025). This rests on tensor cores that treat the rows of
a tile alike, which they do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.gpu.kernels.linear import encodings
from app.gpu.kernels.linear.encodings import Codes, Grouped

TILE_ROWS, TILE_OUTPUTS, TILE_INPUTS = 64, 64, 64
"""One size for every product of one type. 64 rows are the fewest that Hopper's tensor cores take without waste; a
decode step that has fewer reads its weights once all the same, and those take longer than the sums.
"""
ROW_TILE = 2048
"""Numbers of a row that are rounded at a time."""
FLOAT8_INPUTS, EIGHT_BITS_STAGES = 128, 4
"""Inputs of a tile in float8, and tiles in flight of it and of integers: chosen by reasoning, not tuned on a device."""
GROUPED_STAGES = 4
"""Tiles of codes in flight: the same."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
VECTOR_TILE, WIDE_VECTOR_TILE = 1024, 2048
"""Inputs of a single row that a program reads at a time; the latter where it divides them."""
_MAGNITUDE, _EXPONENT = tl.constexpr(encodings.MAGNITUDE), tl.constexpr(encodings.EXPONENT)
_INFINITE, _NOT_A_NUMBER = tl.constexpr(encodings.INFINITE), tl.constexpr(encodings.NOT_A_NUMBER)
_ABOVE_448, _MAX_CODE = tl.constexpr(encodings.ABOVE_448), tl.constexpr(encodings.MAX_CODE)
_SHIFT, _LEAST_PEAK = tl.constexpr(encodings.SHIFT), tl.constexpr(encodings.LEAST_PEAK)
_TWO_POWERS, _LEAST_NORMAL = tl.constexpr(encodings.TWO_POWERS), tl.constexpr(encodings.LEAST_NORMAL)
_ROUNDER, _ROUNDER_BITS = tl.constexpr(encodings.ROUNDER), tl.constexpr(encodings.ROUNDER_BITS)


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None = None,
    x_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    starts: Tensor | None = None,
) -> Tensor:
    """`x` `[rows, inputs]` times `weight` `[outputs, inputs]` transposed, plus `bias` `[outputs]`: `[rows, outputs]` of
    `dtype`, by default that of `x`. CUDA tensors, or CPU tensors in Triton's interpreter. Sums are float32.

    - `x` and `weight` of one of float32, bfloat16 and float16, the last axis dense;
    - `x` in bfloat16 or float16 (of float32 Triton makes TF32 on some devices) and `weight` int8, dense, with `scales`
      `[inputs / 32, outputs]` float16 for its blocks. The integers become the type of `x` in registers, exactly; the
      sum of each block is multiplied by the block's scale in float32;
    - `x` and `weight` float8_e4m3fn, dense, with `x_scales` `[rows, 1]` and `scales` `[outputs, 1]` float32.

    With `starts` `[experts + 1]` int32, `weight` and `scales` are those of all experts, one behind the other's outputs,
    `bias` is `[experts, outputs]`, and rows `[starts[i], starts[i + 1])` are multiplied with those of expert `i`. The
    host learns nothing of them: there are as many programs as any `starts` could need.
    """
    rows, inputs = x.shape
    experts = 0 if starts is None else len(starts) - 1
    outputs = weight.shape[0] // max(1, experts)
    tiles = triton.cdiv(rows, TILE_ROWS) if starts is None else min(experts, rows) + rows // TILE_ROWS
    y = torch.empty(rows, outputs, dtype=dtype or x.dtype, device=x.device)
    tile_inputs, stages = TILE_INPUTS, 8 // x.element_size()  # 64 KiB of shared memory
    if scales is not None:
        tile_inputs, stages = encodings.INT8_BLOCK if x_scales is None else FLOAT8_INPUTS, EIGHT_BITS_STAGES
    if not rows:
        return y
    with torch.cuda.device_of(x):
        _matmul[tiles, triton.cdiv(outputs, TILE_OUTPUTS)](
            *(x, x_scales, weight, scales, bias, y, starts, rows, x.stride(0), weight.stride(0)),
            experts=experts,
            tile_experts=triton.next_power_of_2(max(1, experts)),
            outputs=outputs,
            inputs=inputs,
            tile_rows=TILE_ROWS,
            tile_outputs=TILE_OUTPUTS,
            tile_inputs=tile_inputs,
            num_warps=4,
            num_stages=stages,
        )
    return y


def matvec(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` `[1, inputs]` times `weight` `[outputs, inputs]` transposed, plus `bias` `[outputs]`: `[1, outputs]`.

    All of one float type, the last axis dense; sums are float32. CUDA tensors, or CPU tensors in Triton's interpreter.
    Such a product takes as long as its weights take to be read. cuBLAS computes a whole tile of rows, and splits the
    sums of small matrices: on an H200 it reads at 58 to 93 % of a copy's rate, and programs of one output at 78 to 100.
    """
    outputs, inputs = weight.shape
    y = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    tile = VECTOR_TILE if inputs % WIDE_VECTOR_TILE else WIDE_VECTOR_TILE
    with torch.cuda.device_of(x):
        sizes = {"inputs": inputs, "tile": min(tile, triton.next_power_of_2(inputs))}
        _matvec[(outputs,)](x, weight, bias, y, weight.stride(0), **sizes, num_warps=4, num_stages=3)
    return y


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    experts: tl.constexpr,
    tile_experts: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
) -> None:
    """One program computes one tile of `y`, transposed: integers become floats in registers, from which tensor cores
    take the left operand only. Rows that share a tile of weights run side by side, so that it is read once. `rows` is
    not specialised: a kernel of its own for one row, or for a multiple of 16, might sum in another order.

    The tiles of rows are those of the first expert that has any, then those of the next. Behind the last one there is
    nothing to do.
    """
    first_row, outputs_of_all = tl.program_id(0) * tile_rows, outputs
    if starts is not None:
        each = tl.arange(0, tile_experts)
        begin = tl.load(starts + each, mask=each < experts, other=0)
        tiles = (tl.load(starts + each + 1, mask=each < experts, other=0) - begin + tile_rows - 1) // tile_rows
        expert = tl.sum((tl.cumsum(tiles, 0) <= tl.program_id(0)).to(tl.int32), 0)
        if expert >= experts:
            return
        before = tl.sum(tl.where(each < expert, tiles, 0), 0)
        first_row = tl.load(starts + expert) + (tl.program_id(0) - before) * tile_rows
        rows = tl.load(starts + expert + 1)
        outputs_of_all = experts * outputs
        weight += expert.to(tl.int64) * outputs * weight_stride
        if scales is not None:
            scales += expert * outputs
        if bias is not None:
            bias += expert * outputs
    row = first_row + tl.arange(0, tile_rows).to(tl.int64)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs).to(tl.int64)
    total = tl.zeros((tile_outputs, tile_rows), dtype=tl.float32)
    for first in range(0, inputs, tile_inputs):
        step = first + tl.arange(0, tile_inputs)
        left = tl.load(
            weight + output[:, None] * weight_stride + step[None, :],
            mask=(output[:, None] < outputs) & (step[None, :] < inputs),
            other=0.0,
        )
        right = tl.load(
            x + row[None, :] * x_stride + step[:, None],
            mask=(row[None, :] < rows) & (step[:, None] < inputs),
            other=0.0,
        )
        if scales is None:
            total = tl.dot(left, right, total, input_precision="ieee")
        elif x_scales is None:  # a tile has the inputs of one block
            scale = tl.load(scales + first // tile_inputs * outputs_of_all + output, mask=output < outputs, other=0.0)
            product = tl.dot(left.to(right.dtype), right, input_precision="ieee")
            total += product * scale.to(tl.float32)[:, None]
        else:  # Hopper's tensor cores sum float8 in fewer bits than float32 has: each tile is added in registers
            total = tl.dot(left, right, total, max_num_imprecise_acc=tile_inputs)
    if x_scales is not None:
        total *= tl.load(x_scales + row, mask=row < rows, other=0.0)[None, :]
        total *= tl.load(scales + output, mask=output < outputs, other=0.0)[:, None]
    if bias is not None:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(
        y + row[None, :] * outputs + output[:, None],
        total.to(y.dtype.element_ty),
        mask=(row[None, :] < rows) & (output[:, None] < outputs),
    )


def arrange_codes(kind: Grouped, codes: Tensor) -> Tensor:
    """The codes of whole rows, `[outputs, bytes]` uint8 as `encodings` has them, as `grouped_matmul` reads them: of
    each tile of inputs, the first half is in the low halves of bytes, the second in the high ones. Rows are whole
    tiles.
    """
    if not kind.codes.in_pairs:
        return codes.contiguous()
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (TILE_INPUTS // 2)))
    apart = torch.stack((padded & 15, padded >> 4), dim=2).view(len(codes), -1, 2, TILE_INPUTS // 2)
    return (apart[:, :, 0] | apart[:, :, 1] << 4).flatten(1)


def grouped_matmul(
    kind: Grouped, x: Tensor, codes: Tensor, bias: Tensor | None, scales: Tensor, zeros: Tensor
) -> Tensor:
    """`x` `[rows, inputs]` in a half type times a weight in groups transposed, plus `bias`: `[rows, outputs]`.

    `codes` are those of `arrange_codes`, `scales` float32 and `zeros` int8, which only some kinds have, are `[outputs,
    groups]`, all dense. Weights are made in registers, with the values that `kind` says, and become the type of `x`.
    Sums are float32. CUDA tensors, or CPU tensors in Triton's interpreter. A row has the same bits in any batch, as
    with `matmul`.
    """
    (rows, inputs), outputs = x.shape, len(codes)
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return y
    with torch.cuda.device_of(x):
        _grouped_matmul[triton.cdiv(rows, TILE_ROWS), triton.cdiv(outputs, TILE_OUTPUTS)](
            *(x, codes, scales, zeros if kind.has_zeros else None, bias, y, rows, x.stride(0)),
            outputs=outputs,
            inputs=inputs,
            code_bytes=codes.shape[1],
            group=kind.inputs,
            in_pairs=kind.codes.in_pairs,
            in_float=kind.codes in (Codes.FLOAT4, Codes.FLOAT8),
            values=_TYPES[kind.values],
            tile_rows=TILE_ROWS,
            tile_outputs=TILE_OUTPUTS,
            tile_inputs=TILE_INPUTS,
            num_warps=4,
            num_stages=GROUPED_STAGES,
        )
    return y


@triton.jit(do_not_specialize=["rows"])
def _grouped_matmul(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    code_bytes: tl.constexpr,
    group: tl.constexpr,
    in_pairs: tl.constexpr,
    in_float: tl.constexpr,
    values: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
) -> None:
    """One program computes one tile of `y`, transposed, as `_matmul` does."""
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows).to(tl.int64)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs).to(tl.int64)
    total = tl.zeros((tile_outputs, tile_rows), dtype=tl.float32)
    tile_bytes: tl.constexpr = tile_inputs // 2 if in_pairs else tile_inputs
    for tile in range(tl.cdiv(inputs, tile_inputs)):
        at = tile * tile_bytes + tl.arange(0, tile_bytes)
        stored = tl.load(
            codes + output[:, None] * code_bytes + at[None, :],
            mask=(output[:, None] < outputs) & (at[None, :] < code_bytes),
            other=0,
        )
        for half in tl.static_range(2 if in_pairs else 1):
            step = tile * tile_inputs + half * tile_bytes + tl.arange(0, tile_bytes)
            place = output[:, None] * (inputs // group) + step[None, :] // group
            known = (output[:, None] < outputs) & (step[None, :] < inputs)
            scale = tl.load(scales + place, mask=known, other=0.0)
            if in_float and in_pairs:
                nibbles = (stored >> 4 * half).to(tl.uint16)
                bits = ((nibbles & 8) << 12) | ((nibbles & 7) << 9)
                numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
            elif in_float:
                numbers = decode(stored)
            elif in_pairs:
                numbers = ((((stored >> 4 * half) & 15) ^ 8).to(tl.int32) - 8).to(tl.float32)
            else:
                numbers = stored.to(tl.int8, bitcast=True).to(tl.float32)
            if zeros is not None:
                numbers -= tl.load(zeros + place, mask=known, other=0).to(tl.float32)
            right = tl.load(
                x + row[None, :] * x_stride + step[:, None],
                mask=(row[None, :] < rows) & (step[:, None] < inputs),
                other=0.0,
            )
            left = (numbers * scale).to(values).to(right.dtype)
            total = tl.dot(left, right, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(
        y + row[None, :] * outputs + output[:, None],
        total.to(y.dtype.element_ty),
        mask=(row[None, :] < rows) & (output[:, None] < outputs),
    )


@triton.jit
def _matvec(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    weight_stride: tl.tensor,
    inputs: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """One program computes one output."""
    output = tl.program_id(0).to(tl.int64)
    total = tl.zeros((tile,), dtype=tl.float32)
    for first in range(0, inputs, tile):
        at = first + tl.arange(0, tile)
        left = tl.load(x + at, mask=at < inputs, other=0.0).to(tl.float32)
        right = tl.load(weight + output * weight_stride + at, mask=at < inputs, other=0.0).to(tl.float32)
        total += left * right
    y_value = tl.sum(total, 0)
    if bias is not None:
        y_value += tl.load(bias + output).to(tl.float32)
    tl.store(y + output, y_value.to(y.dtype.element_ty))


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` `[rows, inputs]` of any float type, the last axis dense, as float8_e4m3fn, and scales `[rows, 1]` float32."""
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


@triton.jit
def magnitude(values: tl.tensor) -> tl.tensor:
    """Bits of the absolute values of float32 as int32, which are in the same order."""
    return values.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def scale_bits(peak: tl.tensor) -> tl.tensor:
    """Of float32, as int32, for rows whose largest `magnitude` is `peak`."""
    bits = tl.maximum((peak + _ABOVE_448) & _EXPONENT, _LEAST_PEAK) - _SHIFT
    return tl.where(peak < _INFINITE, bits, _NOT_A_NUMBER)


@triton.jit
def inverse(bits: tl.tensor) -> tl.tensor:
    """Of the scale that `scale_bits` gives, float32."""
    return (-bits + _TWO_POWERS).to(tl.float32, bitcast=True)


@triton.jit
def encode(scaled: tl.tensor) -> tl.tensor:
    """Codes of float8 as uint8 of float32 between -448 and 448, to nearest even: of one below the least normal number,
    2 to the -6, steps of 2 to the -9; of others, bits of the float32, its exponent made to fit.
    """
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & _MAGNITUDE
    small = (tl.abs(scaled) + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    code = tl.minimum(tl.where(size < _LEAST_NORMAL, small, normal), _MAX_CODE)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode(codes: tl.tensor) -> tl.tensor:
    """Float32 of codes as uint8. As float16 the same bits stand for the number over 256."""
    wide = codes.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
