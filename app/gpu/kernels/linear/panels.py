"""Dense layers on a CPU, by kernels of our own: products with weights in panels, from memory or straight from a file.

The weights keep the checkpoint's type, and become float32 as they are multiplied. Measured over the linears of a 135M
Llama, AVX-512, two cores (`python -m benchmarks.kernels linear`), beside oneDNN on weights in its blocked layout: 0.8
to 1.02 times the time at 1 to 256 rows. What oneDNN cannot do is why they are here:

- They multiply a weight that is still in a file, a part at a time while it is in a core's cache: a pass with streamed
  weights takes a third longer than one with resident ones, not more than twice as long (`python -m loadgen weights`).
  All cores copy, and then compute: a thread that copies beside those takes a core, and all wait for that one.
- Each sum is made from its first term to its last. So a row's bits depend neither on its company, nor on the weight's
  type and place. Products in bfloat16 have other bits where there is AMX, see `amx`: there all of them come from it.
"""

import threading
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from app.gpu.kernels.cpu.amx import multiplies_in_registers, multiply_in_registers
from app.gpu.kernels.cpu.compile import inlined
from app.gpu.kernels.cpu.elementwise import add_, rounded
from app.gpu.kernels.cpu.experts import add_to_groups_
from app.gpu.kernels.cpu.intrinsics import INT64, address_of, fetch_add, instruction
from app.gpu.kernels.cpu.launch import draw, parallel
from app.gpu.kernels.cpu.tiles import COLUMNS, HALVES, PANEL, ROWS, is_in_pairs, make_tile, takes_bfloat16, unpack
from app.gpu.kernels.linear.base import FilePlace, MatmulPrecision, Matrix, Weight, dense_of, split, stack, with_rows
from app.gpu.kernels.linear.encodings import SLICE
from app.gpu.kernels.linear.formats import to_panels

PART_BYTES = 1 << 18
"""Bytes that a thread reads at a time: a part of its second-level cache."""
_SHARE = 8
"""A product is cut into so many parts at least, if it has as many panels: threads do not end at the same time."""
_SLICE = SLICE
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


class PanelLinear:
    """A dense layer of a weight in panels, which sums in float32. What it is given, and gives, has one float type. With
    `in_bfloat16`, for inputs that are even, an input is rounded to it just before its product. Of `experts` only the
    weights of those that have rows are read.
    """

    def __init__(
        self, weight: Matrix, bias: Tensor | None = None, experts: int = 1, *, in_bfloat16: bool = False
    ) -> None:
        self.out_features, self.in_features = weight.shape[0] // experts, weight.shape[1]
        if experts > 1 and self.out_features % PANEL:  # a panel is of one expert
            parts = split(weight, self.out_features)
            weight = stack([with_rows(part, -(-self.out_features // PANEL) * PANEL) for part in parts])
        panels, self._element = to_panels(weight, in_bfloat16=in_bfloat16)
        self._dtype = torch.bfloat16 if in_bfloat16 else torch.float32
        self._experts, self._panels, self._panel_bytes = experts, len(panels) // experts, panels[0].nbytes
        self._part = max(1, min(PART_BYTES // self._panel_bytes, self._panels // _SHARE))
        """Panels that a thread draws at a time."""
        self.weights = [Weight(each) for each in (panels, bias) if each is not None]

    def __call__(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        y = self._multiply(x if x.dtype is self._dtype else rounded(x, self._dtype), self.weights[0], starts)
        if y.shape[-1] > self.out_features:
            y = y[..., : self.out_features]
            y = rounded(y, y.dtype) if starts is None else y.contiguous()  # programs know kernels that take tokens
        if len(self.weights) > 1:
            bias = self.weights[1].tensor
            y = add_(y, bias) if starts is None else add_to_groups_(y, bias, starts)
        return y if y.dtype is x.dtype else rounded(y, x.dtype)

    def _multiply(self, x: Tensor, weight: Weight, starts: Tensor | None) -> Tensor:
        """`[tokens, in_features]` to `[tokens, outputs of all panels]` float32. A weight that is in a file is read
        while it is multiplied; if the file is short, cannot be read, or was changed, it comes to memory.
        """
        if x.dim() != (2 if starts is None else 3) or x.shape[-1] != self.in_features:
            raise ValueError(f"x is {list(x.shape)}, not [rows, {self.in_features}]")
        if (1 if starts is None else len(starts) - 1) != self._experts:
            raise ValueError(f"the layer has {self._experts} experts, whose rows must be given")
        x = x if x.is_contiguous() or (starts is None and x.stride(1) == 1) else x.contiguous()
        y = x.new_empty(*x.shape[:-1], self._panels * PANEL, dtype=torch.float32)

        def launch(weight: int, file: int = -1, scratch: int = 0, threads: int = 0) -> bool:
            """Returns whether the whole weight was there."""
            arguments = _multiply(
                tokens=x.shape[0],
                inputs=self.in_features,
                panels=self._panels,
                part=self._part,
                panel_bytes=self._panel_bytes,
                x=x.data_ptr(),
                x_bytes=x.stride(-2) * x.itemsize,
                out=y.data_ptr(),
                weight=weight,
                experts=self._experts,
                starts=starts,
                file=file,
                scratch=scratch,
                threads=threads,
                element=self._element,
                from_file=threads > 0,
            )
            return not arguments.short

        place = weight.place
        if isinstance(place, FilePlace):
            threads, part_bytes = torch.get_num_threads(), self._part * self._panel_bytes
            scratch = getattr(_own, "scratch", None)
            if scratch is None or scratch.numel() < threads * part_bytes:
                scratch = _own.scratch = torch.empty(threads * part_bytes, dtype=torch.uint8)
            if launch(place.offset, place.file, scratch.data_ptr(), threads) and place.is_intact():
                return y
        launch(weight.tensor.data_ptr())
        return y


def make_panels(
    dtype: torch.dtype, precision: MatmulPrecision, weight: Matrix, bias: Tensor | None = None, experts: int = 1
) -> PanelLinear:
    """The layer of a model that computes in `dtype`. One of a half type has weights of it."""
    weight = weight if dtype is torch.float32 else dense_of(weight).to(dtype)
    kept = isinstance(weight, Tensor) and weight.dtype is torch.bfloat16
    wanted = precision is MatmulPrecision.BFLOAT16 or (precision is MatmulPrecision.AS_KEPT and kept)
    return PanelLinear(weight, bias, experts, in_bfloat16=wanted and weight.shape[1] % 2 == 0)


def read_on_torch_threads(file: int, offset: int, target: Tensor) -> bool:
    """Fill `target`, `[bytes]` uint8 on the host, with bytes of the open `file` from `offset` on, if all are there."""
    arguments = _read_parts(
        file=file, offset=offset, target=target.data_ptr(), nbytes=target.numel(), part_bytes=PART_BYTES
    )
    return not arguments.short


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
    experts: int,
    file: int,
    scratch: int,
    threads: int,
    starts: Tensor | None = None,
    next_thread: int = 0,
    short: int = 0,
    *,
    element: Any,
    from_file: bool,
) -> None:
    """Draw parts of the product of `x` `[tokens, inputs]`, whose rows are `x_bytes` apart, until none is left.

    The product is `out` `[tokens, panels * PANEL]`, dense, in parts of `part` panels of `panel_bytes`. These are
    addresses, as is `weight`. Or that is an offset in `file`, and `short` becomes 1 if the file has ended early. Then
    each thread has memory for its parts in `scratch`, for `threads` of them: `next_thread` counts those.

    With `starts` each expert has such panels, one's behind the other's, and the rows that `starts` gives it.
    """
    own = 0
    if from_file:
        thread = fetch_add(address_of(a) + _NEXT_THREAD, 1)
        if thread >= threads:
            return
        own = scratch + thread * part * panel_bytes
    parts = (panels + part - 1) // part
    expert, turn = 0, 0
    rows: Any = tokens
    base: Any = 0
    while a.short == 0:
        item = draw(a)
        if starts is not None:  # parts of the first expert that has rows, then of the next: items only grow
            while expert < experts and (starts[expert] == starts[expert + 1] or turn < item // parts):
                turn += 1 if starts[expert] < starts[expert + 1] else 0
                expert += 1
            if expert == experts:
                return
            base, item = starts[expert], item % parts
            rows = starts[expert + 1] - base
        first = item * part
        if first >= panels:
            return
        end, at = min(first + part, panels), weight + (expert * panels + first) * panel_bytes
        if from_file:
            if not _read_part(file, at, own, (end - first) * panel_bytes):
                a.short = 1
                return
            at = own
        for panel in range(first, end):
            _multiply_panel(element, a, at + (panel - first) * panel_bytes, panel, base, rows)


_NEXT_THREAD: int = _multiply.arguments.next_thread.offset


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
_IN_REGISTERS = multiplies_in_registers()
_multiply_halves = multiply_in_registers if _IN_REGISTERS else _multiply_rows


@inlined
def _multiply_panel(element: Any, a: Any, weight: Any, panel: Any, base: Any, rows: Any) -> None:
    """So many `rows`, from row `base` on, with the panel at address `weight`."""
    x, out_bytes = a.x + base * a.x_bytes, a.panels * PANEL * 4
    out = a.out + base * out_bytes + panel * PANEL * 4
    few = _SLICED_ROWS_OF_PAIRS if is_in_pairs(element) else _SLICED_ROWS
    if rows < few and not (_IN_REGISTERS and takes_bfloat16(element)):
        _multiply_rows(element, rows, x, a.x_bytes, weight, a.inputs, out, out_bytes, 0)
        return
    scratch = _scratch()
    for first in range(0, a.inputs, _SLICE):
        count = min(_SLICE, a.inputs - first)
        unpacked = unpack(element, weight + a.panel_bytes * first // a.inputs, count, scratch)
        if takes_bfloat16(element):
            _multiply_halves(HALVES, rows, x + first * 2, a.x_bytes, unpacked, count, out, out_bytes, first)
        else:
            _multiply_rows(np.float32, rows, x + first * 4, a.x_bytes, unpacked, count, out, out_bytes, first)
