"""The product of all rows with one panel of weights: by which tiles, and whether it is made in slices."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from app.gpu.cpu.compile import inlined
from app.gpu.linear.cpu_tile import COLUMNS, ROWS, make_scratch, make_tile, unpack
from app.gpu.linear.cpu_weights import PANEL

_SLICE = 512
"""Inputs of which many rows are multiplied at a time: with a panel's outputs a part of the second-level cache."""
_SLICED_ROWS, _SLICED_ROWS_OF_PAIRS = 16, 6
"""From so many rows on a product is made in slices, for which weights of another type than float32 are unpacked to the
cache; for fewer rows each tile unpacks them in registers. Measured over the linears of a 135M Llama on AVX2, of which
the tiles have six rows: unpacking two quants from a byte pays from one full tile on, all else from three."""

_tile, _tile_of_4 = make_tile(ROWS, COLUMNS), make_tile(4, COLUMNS)
_tile_of_2, _tile_of_1 = make_tile(2, PANEL), make_tile(1, PANEL)
_scratch = make_scratch(_SLICE * PANEL * 4)


def _sliced_from(typing: Any, element: Any) -> Any:
    """`_sliced_rows(element)`: from how many rows on products with weights of that type are made in slices."""
    in_pairs = isinstance(element.dtype, types.Record) and "pairs" in element.dtype.fields
    rows = _SLICED_ROWS_OF_PAIRS if in_pairs else _SLICED_ROWS

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(types.int64, rows)

    return types.int64(element), generate


_sliced_rows: Any = intrinsic(_sliced_from)


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
        _multiply(np.float32, rows, x + first * 4, x_bytes, unpacked, count, out, out_bytes, first)


@inlined
def _multiply(
    element: Any, rows: Any, x: Any, x_bytes: Any, weight: Any, inputs: Any, out: Any, out_bytes: Any, carry: Any
) -> None:
    row = 0
    while row + 4 <= rows:
        start, target = x + row * x_bytes, out + row * out_bytes
        if row + ROWS <= rows:
            for column in range(0, PANEL, COLUMNS):
                _tile(element, start, x_bytes, weight, column, inputs, target + column * 4, out_bytes, carry)
            row += ROWS
        else:
            for column in range(0, PANEL, COLUMNS):
                _tile_of_4(element, start, x_bytes, weight, column, inputs, target + column * 4, out_bytes, carry)
            row += 4
    if row + 2 <= rows:
        start, target = x + row * x_bytes, out + row * out_bytes
        _tile_of_2(element, start, x_bytes, weight, 0, inputs, target, out_bytes, carry)
        row += 2
    if row < rows:
        start, target = x + row * x_bytes, out + row * out_bytes
        _tile_of_1(element, start, x_bytes, weight, 0, inputs, target, out_bytes, carry)
