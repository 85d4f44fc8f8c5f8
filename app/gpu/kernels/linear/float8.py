"""Float8 E4M3 (Micikevicius et al., arXiv:2209.05433) with a scale for each row of numbers, in plain PyTorch.

A scale is the least power of two with which the row's largest number is at most 448, the largest of the type. So it
rounds nothing itself: what float8 and scale stand for is a number of bfloat16 and float32. The rule looks at bits only,
and is the same in every kernel that rounds (`triton_rounding`, `cpu.intrinsics`).
"""

import torch
from torch import Tensor

MAX_CODE = 0x7E
"""Of the largest number."""
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


def round_to_float8(values: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., n]` of any float type to nearest even: `[..., n]` float8_e4m3fn and scales `[..., 1]` float32.

    The scale of a row with a number that is not finite is not a number.
    """
    wide = values.float()
    peaks = (wide.view(torch.int32) & MAGNITUDE).amax(-1, keepdim=True)
    bits = ((peaks + ABOVE_448) & EXPONENT).clamp(min=LEAST_PEAK) - SHIFT
    scales = torch.where(peaks < INFINITE, bits, NOT_A_NUMBER).to(torch.int32).view(torch.float32)
    return (wide / scales).to(torch.float8_e4m3fn), scales


def widen_float8(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What `[..., n]` float8_e4m3fn and `[..., 1]` float32 stand for, as `dtype`."""
    return (numbers.float() * scales).to(dtype)
