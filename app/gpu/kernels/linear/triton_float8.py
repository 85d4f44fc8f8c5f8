"""Float8 in Triton's kernels, bit for bit as `eight_bits` rounds to it: on devices that have no float8 too."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.gpu.kernels.linear import eight_bits

_MAGNITUDE, _EXPONENT = tl.constexpr(eight_bits.MAGNITUDE), tl.constexpr(eight_bits.EXPONENT)
_INFINITE, _NOT_A_NUMBER = tl.constexpr(eight_bits.INFINITE), tl.constexpr(eight_bits.NOT_A_NUMBER)
_ABOVE_448, _MAX_CODE = tl.constexpr(eight_bits.ABOVE_448), tl.constexpr(eight_bits.MAX_CODE)
_SHIFT, _LEAST_PEAK = tl.constexpr(eight_bits.SHIFT), tl.constexpr(eight_bits.LEAST_PEAK)
_TWO_POWERS, _LEAST_NORMAL = tl.constexpr(eight_bits.TWO_POWERS), tl.constexpr(eight_bits.LEAST_NORMAL)
_ROUNDER, _ROUNDER_BITS = tl.constexpr(eight_bits.ROUNDER), tl.constexpr(eight_bits.ROUNDER_BITS)
ROW_TILE = 2048
"""Numbers of a row that are rounded at a time."""


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` `[rows, inputs]` of any float type, the last axis dense, as `[rows, inputs]` float8_e4m3fn and the scales of
    the rows `[rows, 1]` float32, as `float8_rows` has them.
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
    """Codes of float8 as uint8 of float32 between -448 and 448, to nearest even.

    A number below the least normal one, 2 to the -6, has an integer as its code: it is rounded where its last place
    counts steps of 2 to the -9. The codes of others are bits of the float32, its exponent made to fit.
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
