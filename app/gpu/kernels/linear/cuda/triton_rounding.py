"""Rounding to float8 in Triton's kernels, bit for bit as `float8` has it: on devices that have no float8 too."""

import triton
import triton.language as tl

from app.gpu.kernels.linear import float8

_MAGNITUDE, _EXPONENT = tl.constexpr(float8.MAGNITUDE), tl.constexpr(float8.EXPONENT)
_INFINITE, _NOT_A_NUMBER = tl.constexpr(float8.INFINITE), tl.constexpr(float8.NOT_A_NUMBER)
_ABOVE_448, _MAX_CODE = tl.constexpr(float8.ABOVE_448), tl.constexpr(float8.MAX_CODE)
_SHIFT, _LEAST_PEAK = tl.constexpr(float8.SHIFT), tl.constexpr(float8.LEAST_PEAK)
_TWO_POWERS, _LEAST_NORMAL = tl.constexpr(float8.TWO_POWERS), tl.constexpr(float8.LEAST_NORMAL)
_ROUNDER, _ROUNDER_BITS = tl.constexpr(float8.ROUNDER), tl.constexpr(float8.ROUNDER_BITS)


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
