"""Matrices as rows of bytes, so that they are stacked, split, streamed and looked up as blocks of a GGUF file are.

In 8 bits a weight: integers in blocks with a scale each, and float8 with a scale for each row.

    INT8     blocks of 34 bytes: a scale float16, then 32 integers int8. GGUF's Q8_0, to the bit
    FLOAT8   the row's numbers as float8 E4M3, then its scale float32

The scale of a row of float8 E4M3 (Micikevicius et al., arXiv:2209.05433) is the least power of two with which the row's
largest number is at most 448, the largest of the type. So it rounds nothing itself. The rule looks at bits only, and is
the same in every kernel that rounds (`triton_matmul`, `attention.cpu`). Keys and values in float8 follow it too.

As quantized checkpoints have them: codes of 4 or 8 bits, and a scale for each group of inputs. A weight is
`(code - zero) * scale`, in float32, rounded once to the type in which the format's own library computes. All formats
share this one form: AWQ, GPTQ, compressed-tensors, float8 in blocks, NVFP4, MXFP4. So kernels read one. A row is a run
of groups, each of which has

    4 bytes    the scale, float32
    1 byte     the zero, int8; then 3 bytes of nothing
    the rest   codes: two neighbours in a byte, the first in its low half, or a byte each
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import gcd

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange

INT8, FLOAT8 = "Q8_0", "F8_E4M3"
"""Kinds of a `BlockMatrix`."""
INT8_BLOCK, INT8_BYTES = 32, 34
FLOAT8_STEP, SCALE_BYTES = 16, 4
"""Inputs of a float8 matrix are a multiple of the former: `torch._scaled_mm` takes no others."""
MAX_CODE = 0x7E
"""The float8 of the largest number."""
MAGNITUDE, EXPONENT, INFINITE, NOT_A_NUMBER = 0x7FFFFFFF, 0x7F800000, 0x7F800000, 0x7FC00000
"""Bits of float32."""
ABOVE_448 = 0x1FFFFF
"""Carries into the exponent of a float32 whose significand is above that of 448, 1.75."""
SHIFT, LEAST_PEAK = 8 << 23, 9 << 23
"""The exponent of 448, as bits of float32, and that of the least peak whose scale is a normal number."""
TWO_POWERS = 254 << 23
"""Bits of float32 from which those of a power of two are taken for its inverse."""
LEAST_NORMAL = 0x3C800000
"""Bits of float32 of the least normal number, 2 to the -6. Numbers below it are multiples of 2 to the -9."""
ROUNDER, ROUNDER_BITS = 16384.0, 0x46800000
"""A number of float32 whose last place counts steps of 2 to the -9, and its bits."""
_ROWS = 2048
"""That are rounded at a time: what that takes beside the result is some copies of them."""
HEAD_BYTES = 8
"""Of a group, before its codes."""
SLICE = 512
"""Inputs that a kernel unpacks at a time, which whole groups must make up: larger groups are several with one scale."""
_LEAST = 16
"""Inputs of the smallest group that is worth its scale."""


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
    round_rows = _round_to_int8 if kind == INT8 else float8_rows
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
    """The numbers `[..., n]` float8_e4m3fn and the scales `[..., 1]` float32 of rows of bytes: views."""
    return rows[..., :-SCALE_BYTES].view(torch.float8_e4m3fn), rows[..., -SCALE_BYTES:].view(torch.float32)


def _round_to_int8(values: Tensor) -> Tensor:
    """As gguf's own `quantize`: halves are rounded away from zero, by the scale before it becomes float16."""
    blocks = values.unflatten(1, (-1, INT8_BLOCK))
    scales = blocks.abs().amax(2, keepdim=True) / 127
    scaled = blocks * torch.where(scales == 0, 0.0, 1 / scales)
    whole = scaled.abs().floor()
    rounded = (whole + (2 * (scaled.abs() - whole)).floor()) * scaled.sign()
    parts = scales.half().view(torch.uint8), rounded.to(torch.int8).view(torch.uint8)
    return torch.cat(parts, dim=2).flatten(1)


def float8_rows(values: Tensor) -> Tensor:
    """`[..., n]` of any float type as rows of bytes `[..., n + 4]`: numbers, to nearest even, then their scale, which
    is not a number if one of them is not finite.
    """
    wide = values.float()
    peaks = (wide.view(torch.int32) & MAGNITUDE).amax(-1, keepdim=True)
    bits = ((peaks + ABOVE_448) & EXPONENT).clamp(min=LEAST_PEAK) - SHIFT
    scales = torch.where(peaks < INFINITE, bits, NOT_A_NUMBER).to(torch.int32)
    numbers = (wide / scales.view(torch.float32)).to(torch.float8_e4m3fn)
    return torch.cat([numbers.view(torch.uint8), scales.view(torch.uint8)], dim=-1)


def widen_float8(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What `[..., n]` float8_e4m3fn and `[..., 1]` float32 stand for, as `dtype`."""
    return (numbers.float() * scales).to(dtype)


class Codes(StrEnum):
    """What codes stand for: signed integers, E2M1 (OCP Microscaling Formats, version 1.0), or E4M3."""

    INT4 = "int4"
    INT8 = "int8"
    FLOAT4 = "float4"
    FLOAT8 = "float8"

    @property
    def in_pairs(self) -> bool:
        """Whether a byte has two of them."""
        return self in (Codes.INT4, Codes.FLOAT4)


@dataclass(frozen=True, slots=True)
class Grouped:
    """The kind of a `BlockMatrix`. `values` is the type to which weights are rounded, float32 if they are not; `scales`
    is a type that holds every scale exactly.
    """

    codes: Codes
    inputs: int
    """Of a group."""
    values: torch.dtype
    scales: torch.dtype
    has_zeros: bool = False

    @property
    def code_bytes(self) -> int:
        """Of a group."""
        return self.inputs // 2 if self.codes.in_pairs else self.inputs

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of `rows` `[n, bytes]` uint8: codes `[n, groups, bytes]` uint8, scales `[n, groups]` float32 and zeros
        `[n, groups]` int8. All are views.
        """
        groups = rows.unflatten(1, (-1, HEAD_BYTES + self.code_bytes))
        zeros = groups[:, :, 4].view(torch.int8)
        return groups[:, :, HEAD_BYTES:], groups[:, :, :4].view(torch.float32)[:, :, 0], zeros

    def dequantize(self, rows: Tensor) -> Tensor:
        """The weights of `rows` `[n, bytes]` uint8, `[n, inputs]` float32."""
        codes, scales, zeros = self.parts(rows)
        numbers = code_values(self.codes, codes) - zeros.float()[:, :, None]
        return (numbers * scales[:, :, None]).to(self.values).float().flatten(1)


def code_values(codes: Codes, stored: Tensor) -> Tensor:
    """What codes `[..., n]` uint8 stand for, float32; of those that are `in_pairs`, `[..., 2 n]`."""
    if codes is Codes.FLOAT8:
        return stored.view(torch.float8_e4m3fn).float()
    if codes is Codes.INT8:
        return stored.view(torch.int8).float()
    pairs = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)
    if codes is Codes.INT4:
        return ((pairs ^ 8).view(torch.int8) - 8).float()
    bits = (pairs & 8).short() << 12 | (pairs & 7).short() << 9  # as float16 the same bits stand for a 2 ** 14th
    return bits.view(torch.float16).float() * 16384.0


def group_inputs(group: int, inputs: int) -> int | None:
    """Inputs of the groups in which rows of `inputs` are kept, whose scales are those of `group` inputs each; None if
    they are too few.
    """
    found = gcd(group, inputs, SLICE)
    return found if found >= _LEAST else None


def pack_groups(kind: Grouped, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Rows of bytes, of `codes` `[out, inputs]`: int8, or bytes as uint8; of `scales` `[out, groups]` of any type, and
    `zeros` of that shape, or None. On `meta` too.
    """
    outputs, inputs = codes.shape
    count = inputs // kind.inputs
    rows = codes.new_empty((outputs, count, HEAD_BYTES + kind.code_bytes), dtype=torch.uint8)
    if rows.is_meta:
        return rows.flatten(1)
    rows[:, :, :HEAD_BYTES] = 0
    rows[:, :, :4] = scales.float().contiguous()[:, :, None].view(torch.uint8)
    if zeros is not None:
        rows[:, :, 4] = zeros.to(torch.int8).view(torch.uint8)
    stored = codes.view(torch.uint8) if codes.itemsize == 1 else codes.to(torch.int8).view(torch.uint8)
    if kind.codes.in_pairs:
        stored = stored[:, 0::2] & 15 | stored[:, 1::2] << 4
    rows[:, :, HEAD_BYTES:] = stored.unflatten(1, (count, -1))
    return rows.flatten(1)
