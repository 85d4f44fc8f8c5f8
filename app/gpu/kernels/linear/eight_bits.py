"""Matrices in 8 bits a weight: integers in blocks with a scale each, and float8 with a scale for each row.

Both are rows of bytes, so that they are stacked, split, streamed and looked up as blocks of a GGUF file are:

    INT8     blocks of 34 bytes: a scale float16, then 32 integers int8. GGUF's Q8_0, to the bit
    FLOAT8   the row's numbers as float8 E4M3, then its scale float32
"""

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.kernels.linear.float8 import round_to_float8, widen_float8

INT8, FLOAT8 = "Q8_0", "F8_E4M3"
"""Kinds of a `BlockMatrix`."""
INT8_BLOCK, INT8_BYTES = 32, 34
FLOAT8_STEP, SCALE_BYTES = 16, 4
"""Inputs of a float8 matrix are a multiple of the former: `torch._scaled_mm` takes no others."""
_ROWS = 2048
"""That are rounded at a time: what that takes beside the result is some copies of them."""


def require_inputs(kind: str, inputs: int, name: str) -> None:
    """Raise FieldOutOfRange if the rows of the matrix `name` cannot be rounded to `kind`."""
    step, asked = (INT8_BLOCK, "int8") if kind == INT8 else (FLOAT8_STEP, "float8")
    if inputs % step:
        raise FieldOutOfRange(
            f"weights_dtype: {asked} needs matrices whose rows have a multiple of {step} values; {name} has {inputs}",
            param="weights_dtype",
        )


def row_bytes(kind: str, inputs: int) -> int:
    """Bytes of a row of so many numbers."""
    return inputs // INT8_BLOCK * INT8_BYTES if kind == INT8 else inputs + SCALE_BYTES


def quantize(kind: str, values: Tensor) -> Tensor:
    """`[rows, inputs]` of any float type, rounded to nearest: `[rows, bytes]` uint8 on the same device."""
    rows = values.new_empty((len(values), row_bytes(kind, values.shape[1])), dtype=torch.uint8)
    round_rows = _round_to_int8 if kind == INT8 else _round_to_float8
    for part, target in zip(values.split(_ROWS), rows.split(_ROWS), strict=True):
        target.copy_(round_rows(part.float()))
    return rows


def dequantize(kind: str, rows: Tensor) -> Tensor:
    """The numbers of `[rows, bytes]` uint8, `[rows, inputs]` float32."""
    if kind == INT8:
        numbers, scales = int8_parts(rows)
        return (numbers.float() * scales[:, :, None].float()).flatten(1)
    return widen_float8(*float8_parts(rows), torch.float32)


def int8_parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The integers `[rows, blocks, 32]` int8 and the scales `[rows, blocks]` float16: views."""
    blocks = rows.unflatten(1, (-1, INT8_BYTES))
    return blocks[:, :, 2:].view(torch.int8), blocks[:, :, :2].view(torch.float16)[:, :, 0]


def float8_parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers `[rows, inputs]` float8_e4m3fn and the scales `[rows, 1]` float32: views."""
    return rows[:, :-SCALE_BYTES].view(torch.float8_e4m3fn), rows[:, -SCALE_BYTES:].view(torch.float32)


def _round_to_int8(values: Tensor) -> Tensor:
    """As gguf's own `quantize`: halves are rounded away from zero, by the scale before it becomes float16."""
    blocks = values.unflatten(1, (-1, INT8_BLOCK))
    scales = blocks.abs().amax(2, keepdim=True) / 127
    scaled = blocks * torch.where(scales == 0, 0.0, 1 / scales)
    whole = scaled.abs().floor()
    rounded = (whole + (2 * (scaled.abs() - whole)).floor()) * scaled.sign()
    parts = scales.half().view(torch.uint8), rounded.to(torch.int8).view(torch.uint8)
    return torch.cat(parts, dim=2).flatten(1)


def _round_to_float8(values: Tensor) -> Tensor:
    numbers, scales = round_to_float8(values)
    return torch.cat([numbers.view(torch.uint8), scales.view(torch.uint8)], dim=1)
