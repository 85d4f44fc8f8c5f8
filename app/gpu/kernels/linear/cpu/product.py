"""The product of all rows with one panel of weights: by which tiles, and whether it is made in slices."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from app.gpu.kernels.cpu.compile import inlined
from app.gpu.kernels.linear.cpu.blocks import is_in_pairs, multiplies_rounded
from app.gpu.kernels.linear.cpu.pairs import HALVES
from app.gpu.kernels.linear.cpu.tile import COLUMNS, ROWS, make_scratch, make_tile, unpack
from app.gpu.kernels.linear.cpu.weights import PANEL

_SLICE = 512
"""Inputs of which many rows are multiplied at a time: with a panel's outputs a part of the second-level cache."""
_SLICED_ROWS, _SLICED_ROWS_OF_PAIRS = 16, 6
"""From so many rows on a product is made in slices, for which weights of another type than float32 are unpacked to the
cache; for fewer rows each tile unpacks them in registers. Measured over the linears of a 135M Llama on AVX2, of which
the tiles have six rows: unpacking two quants from a byte pays from one full tile on, all else from three."""

_ROWS_TO_PREFETCH = 6
"""Rows of a tile from which on weights are prefetched; see `Pairs`."""


def _make_tiles(rows: int, columns: int) -> Any:
    """`tiles(element, x, x_bytes, weight, inputs, out, out_bytes, carry)`: all outputs of a panel for `rows` rows."""
    tile = make_tile(rows, columns, ahead=rows >= _ROWS_TO_PREFETCH)

    @inlined
    def tiles(
        element: Any, x: Any, x_bytes: Any, weight: Any, inputs: Any, out: Any, out_bytes: Any, carry: Any
    ) -> None:
        for column in range(0, PANEL, columns):
            tile(element, x, x_bytes, weight, column, inputs, out + column * 4, out_bytes, carry)

    return tiles


_tiles, _tiles_of_8, _tiles_of_6 = (_make_tiles(rows, COLUMNS) for rows in (ROWS, 8, 6))
_tiles_of_5, _tiles_of_4, _tiles_of_3 = (_make_tiles(rows, COLUMNS) for rows in (5, 4, 3))
_tiles_of_2, _tiles_of_1 = _make_tiles(2, PANEL), _make_tiles(1, PANEL)
_scratch = make_scratch(_SLICE * PANEL * 4)


def _sliced_from(typing: Any, element: Any) -> Any:
    """`_sliced_rows(element)`: from how many rows on products with weights of that type are made in slices."""
    rows = _SLICED_ROWS_OF_PAIRS if is_in_pairs(element) else _SLICED_ROWS

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(types.int64, rows)

    return types.int64(element), generate


def _is_rounded(typing: Any, element: Any) -> Any:
    """`takes_bfloat16(element)`: whether `x` is bfloat16 for weights of that type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(types.boolean, multiplies_rounded(element))

    return types.boolean(element), generate


_sliced_rows: Any = intrinsic(_sliced_from)
takes_bfloat16: Any = intrinsic(_is_rounded)


@inlined
def multiply_panel(
    element: Any, rows: Any, x: Any, x_bytes: Any, weight: Any, inputs: Any, panel_bytes: Any, out: Any, out_bytes: Any
) -> None:
    """`x` `[rows, inputs]` times the panel of `panel_bytes` at `weight`, of the type `element`, to `out`
    `[rows, PANEL]`; arguments as in `make_tile`.
    """
    if rows < _sliced_rows(element):
        _multiply(element, rows, x, x_bytes, weight, inputs, out, out_bytes, 0)
        return
    scratch = _scratch()
    for first in range(0, inputs, _SLICE):
        count = min(_SLICE, inputs - first)
        unpacked = unpack(element, weight + panel_bytes * first // inputs, count, scratch)
        if takes_bfloat16(element):
            _multiply(HALVES, rows, x + first * 2, x_bytes, unpacked, count, out, out_bytes, first)
        else:
            _multiply(np.float32, rows, x + first * 4, x_bytes, unpacked, count, out, out_bytes, first)


@inlined
def _multiply(
    element: Any, rows: Any, x: Any, x_bytes: Any, weight: Any, inputs: Any, out: Any, out_bytes: Any, carry: Any
) -> None:
    row = 0
    while row + ROWS <= rows:
        _tiles(element, x + row * x_bytes, x_bytes, weight, inputs, out + row * out_bytes, out_bytes, carry)
        row += ROWS
    if ROWS > 8 and row + 8 <= rows:
        _tiles_of_8(element, x + row * x_bytes, x_bytes, weight, inputs, out + row * out_bytes, out_bytes, carry)
        row += 8
    if ROWS > 6 and row + 6 <= rows:
        _tiles_of_6(element, x + row * x_bytes, x_bytes, weight, inputs, out + row * out_bytes, out_bytes, carry)
        row += 6
    left, start, target = rows - row, x + row * x_bytes, out + row * out_bytes
    if left == 1:
        _tiles_of_1(element, start, x_bytes, weight, inputs, target, out_bytes, carry)
    elif left == 2:
        _tiles_of_2(element, start, x_bytes, weight, inputs, target, out_bytes, carry)
    elif left == 3:
        _tiles_of_3(element, start, x_bytes, weight, inputs, target, out_bytes, carry)
    elif left == 4:
        _tiles_of_4(element, start, x_bytes, weight, inputs, target, out_bytes, carry)
    elif left == 5:
        _tiles_of_5(element, start, x_bytes, weight, inputs, target, out_bytes, carry)
