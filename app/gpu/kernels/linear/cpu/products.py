"""Products with weights in panels, on the threads that PyTorch computes with: from memory, or straight from a file.

On a CPU only its cores copy. A thread that copies beside those that compute takes a core from one of them, for which
the others then wait at the end of every operator; all of them together copy, and then compute, in less time.
"""

import threading
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from app.gpu.kernels.cpu.compile import inlined
from app.gpu.kernels.cpu.intrinsics import INT64, address_of, fetch_add, instruction
from app.gpu.kernels.cpu.launch import draw, parallel
from app.gpu.kernels.cpu.tiles import COLUMNS, HALVES, PANEL, ROWS, is_in_pairs, make_tile, takes_bfloat16, unpack
from app.gpu.kernels.linear.cpu.formats import PanelFormat

PART_BYTES = 1 << 18
"""Bytes that a thread reads at a time: a part of its second-level cache."""
_SHARE = 8
"""A product is cut into so many parts at least, if it has as many panels: threads do not end at the same time."""
_SLICE = 512
"""Inputs of which many rows are multiplied at a time: with a panel's outputs a part of the second-level cache."""
_SLICED_ROWS, _SLICED_ROWS_OF_PAIRS = 16, 6
"""From so many rows on a product is made in slices, for which weights of another type than float32 are unpacked to the
cache; for fewer rows each tile unpacks them in registers. Measured over the linears of a 135M Llama on AVX2, of which
the tiles have six rows: unpacking two quants from a byte pays from one full tile on, all else from three."""
_ROWS_TO_PREFETCH = 6
"""Rows of a tile from which on weights are prefetched; see `tiles`."""
_pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uintp, types.int64))
"""POSIX `pread`."""
_own = threading.local()
"""Memory that a thread has its products' parts read into, kept: fresh memory costs a page fault per page."""


class PanelShape:
    """Of a weight in panels, and how threads share its product."""

    def __init__(self, panels: int, inputs: int, format: PanelFormat) -> None:
        self.panels, self.inputs, self.element = panels, inputs, format.element
        self.dtype = format.inputs
        """Of what is multiplied with it."""
        self.panel_bytes = inputs // format.group * format.group_bytes
        self.part = max(1, min(PART_BYTES // self.panel_bytes, panels // _SHARE))
        """Panels that a thread draws at a time."""


def multiply(x: Tensor, weight: Tensor, shape: PanelShape) -> Tensor:
    """`x` `[rows, inputs]`, of the shape's dtype, times a dense `weight` of `shape`: `[rows, panels * PANEL]`, float32.
    Raises ValueError for another `x`.
    """
    return _run(_from_memory, x, shape, weight=weight.data_ptr())[0]


def multiply_from_file(x: Tensor, file: int, offset: int, shape: PanelShape) -> Tensor | None:
    """The same with a weight that the open `file` holds from byte `offset` on, read while it is multiplied.

    None if the file is shorter, or cannot be read.
    """
    threads, part_bytes = torch.get_num_threads(), shape.part * shape.panel_bytes
    scratch = getattr(_own, "scratch", None)
    if scratch is None or scratch.numel() < threads * part_bytes:
        scratch = _own.scratch = torch.empty(threads * part_bytes, dtype=torch.uint8)
    y, short = _run(_from_file, x, shape, weight=offset, file=file, scratch=scratch.data_ptr(), threads=threads)
    return None if short else y


def read_on_torch_threads(file: int, offset: int, target: Tensor) -> bool:
    """Fill `target`, `[bytes]` uint8 on the host, with the bytes of the open `file` from `offset` on. Returns whether
    all of them were there; if not, the next read of them fails with the reason.
    """
    arguments = _read_parts(
        file=file, offset=offset, target=target.data_ptr(), nbytes=target.numel(), part_bytes=PART_BYTES
    )
    return not arguments.short


def _run(share: Any, x: Tensor, shape: PanelShape, **more: int) -> tuple[Tensor, bool]:
    if x.dtype is not shape.dtype or x.dim() != 2 or x.shape[1] != shape.inputs:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, not {shape.dtype} [rows, {shape.inputs}]")
    x = x if x.stride(1) == 1 else x.contiguous()
    y = x.new_empty(x.shape[0], shape.panels * PANEL, dtype=torch.float32)
    arguments = _multiply(
        tokens=x.shape[0],
        inputs=shape.inputs,
        panels=shape.panels,
        part=shape.part,
        panel_bytes=shape.panel_bytes,
        x=x.data_ptr(),
        x_bytes=x.stride(0) * x.itemsize,
        out=y.data_ptr(),
        element=shape.element,
        share=share,
        **more,
    )
    return y, bool(arguments.short)


@parallel
def _multiply(
    a: Any,
    tokens: int,
    inputs: int,
    panels: int,
    part: int,
    panel_bytes: int,
    x: int,
    x_bytes: int,
    out: int,
    weight: int,
    file: int = 0,
    scratch: int = 0,
    threads: int = 0,
    next_thread: int = 0,
    short: int = 0,
    *,
    element: Any,
    share: Any,
) -> None:
    """`share` the product of `x` `[tokens, inputs]`, whose rows are `x_bytes` apart, to `out`
    `[tokens, panels * PANEL]`, dense, in parts of `part` panels of `panel_bytes`. These are addresses, as is `weight`:
    or it is an offset in `file`, and `short` becomes 1 if that has ended early. Then each thread reads its parts into
    memory of its own: `next_thread` counts those that have theirs in `scratch`, where there is room for `threads`.
    """
    share(a, element)


_NEXT_THREAD: int = _multiply.arguments.next_thread.offset


@inlined
def _from_memory(a: Any, element: Any) -> None:
    """Draw parts until none is left."""
    while True:
        first = draw(a) * a.part
        if first >= a.panels:
            return
        for panel in range(first, min(first + a.part, a.panels)):
            _multiply_panel(element, a, a.weight + panel * a.panel_bytes, panel)


@inlined
def _from_file(a: Any, element: Any) -> None:
    """Draw parts until none is left, or one is short."""
    thread = fetch_add(address_of(a) + _NEXT_THREAD)
    own = a.scratch + thread * a.part * a.panel_bytes
    while a.short == 0 and thread < a.threads:
        first = draw(a) * a.part
        if first >= a.panels:
            return
        end = min(first + a.part, a.panels)
        if not _read_part(a.file, a.weight + first * a.panel_bytes, own, (end - first) * a.panel_bytes):
            a.short = 1
            return
        for panel in range(first, end):
            _multiply_panel(element, a, own + (panel - first) * a.panel_bytes, panel)


@parallel
def _read_parts(a: Any, file: int, offset: int, target: int, nbytes: int, part_bytes: int, short: int = 0) -> None:
    """Draw parts until none is left, or one is short."""
    while a.short == 0:
        start = draw(a) * part_bytes
        if start >= nbytes:
            return
        if not _read_part(file, offset + start, target + start, min(part_bytes, nbytes - start)):
            a.short = 1


@inlined
def _read_part(file: Any, offset: Any, target: Any, nbytes: Any) -> bool:
    """Read `nbytes` of the open `file` from `offset` on to address `target`. Returns whether they were there."""
    done = 0
    while done < nbytes:
        count = _pread(np.int32(file), np.uintp(target + done), np.uintp(nbytes - done), offset + done)
        if count <= 0:
            return False
        done += count
    return True


@instruction(types.int64())
def _scratch(builder: Any) -> Any:
    """`_scratch()`: the address of room for an unpacked slice, on the stack of the function that asks."""
    with builder.goto_entry_block():
        memory = builder.alloca(ir.ArrayType(ir.IntType(8), _SLICE * PANEL * 4))
    memory.align = 64
    return builder.ptrtoint(memory, INT64)


def _with_tiles(size: int, columns: int, rest: Any) -> Any:
    """`multiply(element, rows, x, x_bytes, weight, inputs, out, out_bytes, carry)`: all outputs of a panel, arguments
    as in `make_tile`. Rows are multiplied `size` at a time, in tiles of so many `columns`; those left by `rest`.
    """
    tile = make_tile(size, columns, ahead=size >= _ROWS_TO_PREFETCH)

    @inlined
    def multiply(
        element: Any, rows: Any, x: Any, x_bytes: Any, weight: Any, inputs: Any, out: Any, out_bytes: Any, carry: Any
    ) -> None:
        while rows >= size:
            for column in range(0, PANEL, columns):
                tile(element, x, x_bytes, 1, weight, column, inputs, out + column * 4, out_bytes, carry)
            rows, x, out = rows - size, x + size * x_bytes, out + size * out_bytes
        rest(element, rows, x, x_bytes, weight, inputs, out, out_bytes, carry)

    return multiply


@inlined
def _no_rows(
    element: Any, rows: Any, x: Any, x_bytes: Any, weight: Any, inputs: Any, out: Any, out_bytes: Any, carry: Any
) -> None:
    pass


_multiply_rows = _with_tiles(2, PANEL, _with_tiles(1, PANEL, _no_rows))
for _size in sorted({3, 4, 5, 6, 8, ROWS}):
    if _size <= ROWS:
        _multiply_rows = _with_tiles(_size, COLUMNS, _multiply_rows)


@inlined
def _multiply_panel(element: Any, a: Any, weight: Any, panel: Any) -> None:
    """All rows with the panel at address `weight`."""
    out, out_bytes = a.out + panel * PANEL * 4, a.panels * PANEL * 4
    if a.tokens < (_SLICED_ROWS_OF_PAIRS if is_in_pairs(element) else _SLICED_ROWS):
        _multiply_rows(element, a.tokens, a.x, a.x_bytes, weight, a.inputs, out, out_bytes, 0)
        return
    scratch = _scratch()
    for first in range(0, a.inputs, _SLICE):
        count = min(_SLICE, a.inputs - first)
        unpacked = unpack(element, weight + a.panel_bytes * first // a.inputs, count, scratch)
        if takes_bfloat16(element):
            _multiply_rows(HALVES, a.tokens, a.x + first * 2, a.x_bytes, unpacked, count, out, out_bytes, first)
        else:
            _multiply_rows(np.float32, a.tokens, a.x + first * 4, a.x_bytes, unpacked, count, out, out_bytes, first)
