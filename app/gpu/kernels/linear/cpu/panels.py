"""Products with weights in panels, on the threads that PyTorch computes with, from memory or straight from a file."""

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from app.gpu.kernels.cpu.compile import c_function, inlined
from app.gpu.kernels.cpu.intrinsics import fetch_add, pointer
from app.gpu.kernels.cpu.openmp import run_on_torch_threads
from app.gpu.kernels.cpu.reading import PART_BYTES, read_part
from app.gpu.kernels.linear.cpu.packing import PanelFormat
from app.gpu.kernels.linear.cpu.product import multiply_panel
from app.gpu.kernels.linear.cpu.weights import PANEL

_MakeKernel = Callable[[Any], Callable[[int], None]]


class _Arguments(ctypes.Structure):
    """What kernels read: `x` `[tokens, inputs]` has rows `x_bytes` apart; `out` `[tokens, panels * PANEL]` is dense.

    `next_part` counts the parts of `part` panels of `panel_bytes` that threads have drawn. `weight` is an address, or
    an offset in `file`; then each thread reads its parts into memory of its own: `next_thread` counts those that have
    theirs in `scratch`, where there is room for `threads`. `short` is 1 if the file has ended early.
    """

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("next_part", "next_thread", "short", "tokens", "inputs", "panels")),
        *((name, ctypes.c_int64) for name in ("part", "panel_bytes", "x", "x_bytes", "weight", "out", "file")),
        *((name, ctypes.c_int64) for name in ("scratch", "threads")),
    ]


_ARGUMENTS = np.dtype(_Arguments)
_NEXT_THREAD = _Arguments.next_thread.offset
_SHARE = 8
"""A product is cut into so many parts at least, if it has as many panels: threads do not end at the same time."""


class PanelShape:
    """Of a weight in panels, and how threads share its product."""

    def __init__(self, panels: int, inputs: int, format: PanelFormat) -> None:
        self.panels, self.inputs, self.element = panels, inputs, format.element
        self.dtype = format.inputs
        """Of what is multiplied with it."""
        self.panel_bytes = inputs // format.group * format.group_bytes
        self.part = max(1, min(PART_BYTES // self.panel_bytes, panels // _SHARE))
        """Panels that a thread draws at a time."""
        self.part_bytes = self.part * self.panel_bytes


def multiply(x: Tensor, weight: Tensor, shape: PanelShape) -> Tensor:
    """`x` `[rows, inputs]`, of the shape's dtype, times a dense `weight` of `shape`: `[rows, panels * PANEL]`, float32.
    Raises ValueError for another `x`.
    """
    return _run(_memory_kernel, x, shape, weight=weight.data_ptr())[0]


def multiply_from_file(x: Tensor, file: int, offset: int, shape: PanelShape) -> Tensor | None:
    """The same with a weight that the open `file` holds from byte `offset` on, read while it is multiplied.

    None if the file is shorter, or cannot be read.
    """
    threads = torch.get_num_threads()
    scratch = _scratch(threads * shape.part_bytes).data_ptr()
    y, short = _run(_file_kernel, x, shape, weight=offset, file=file, scratch=scratch, threads=threads)
    return None if short else y


def _run(kernel: _MakeKernel, x: Tensor, shape: PanelShape, **more: int) -> tuple[Tensor, bool]:
    if x.dtype is not shape.dtype or x.dim() != 2 or x.shape[1] != shape.inputs:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, not {shape.dtype} [rows, {shape.inputs}]")
    x = x if x.stride(1) == 1 else x.contiguous()
    y = x.new_empty(x.shape[0], shape.panels * PANEL, dtype=torch.float32)
    arguments = _Arguments(
        tokens=x.shape[0],
        inputs=shape.inputs,
        panels=shape.panels,
        part=shape.part,
        panel_bytes=shape.panel_bytes,
        x=x.data_ptr(),
        x_bytes=x.stride(0) * x.itemsize,
        out=y.data_ptr(),
        **more,
    )
    run_on_torch_threads(_compiled(kernel, shape.element).address, arguments)
    return y, bool(arguments.short)


class _Scratch(threading.local):
    """Memory that a thread has its products' parts read into, kept: fresh memory costs a page fault per page."""

    memory = torch.empty(0, dtype=torch.uint8)


_scratches = _Scratch()


def _scratch(nbytes: int) -> Tensor:
    if _scratches.memory.numel() < nbytes:
        _scratches.memory = torch.empty(nbytes, dtype=torch.uint8)
    return _scratches.memory


@functools.cache
def _compiled(kernel: _MakeKernel, element: Any) -> Any:
    """The kernel for weights of a type, as a C function of the address of an `_Arguments`."""
    return c_function(kernel(element))


def _memory_kernel(element: Any) -> Callable[[int], None]:
    def kernel(address: int) -> None:
        _from_memory(address, element)

    return kernel


def _file_kernel(element: Any) -> Callable[[int], None]:
    def kernel(address: int) -> None:
        _from_file(address, element)

    return kernel


@inlined
def _from_memory(address: int, element: Any) -> None:
    """Draw parts until none is left."""
    a = carray(pointer(address), 1, _ARGUMENTS)[0]
    while True:
        first = fetch_add(address) * a.part
        if first >= a.panels:
            return
        for panel in range(first, min(first + a.part, a.panels)):
            _multiply(element, a, a.weight + panel * a.panel_bytes, panel)


@inlined
def _from_file(address: int, element: Any) -> None:
    """Draw parts until none is left, or one is short."""
    a = carray(pointer(address), 1, _ARGUMENTS)
    panel_bytes = a[0].panel_bytes
    thread = fetch_add(address + _NEXT_THREAD)
    own = a[0].scratch + thread * a[0].part * panel_bytes
    while a[0].short == 0 and thread < a[0].threads:
        first = fetch_add(address) * a[0].part
        if first >= a[0].panels:
            return
        end = min(first + a[0].part, a[0].panels)
        if not read_part(a[0].file, a[0].weight + first * panel_bytes, own, (end - first) * panel_bytes):
            a[0].short = 1
            return
        for panel in range(first, end):
            _multiply(element, a[0], own + (panel - first) * panel_bytes, panel)


@inlined
def _multiply(element: Any, a: Any, weight: Any, panel: Any) -> None:
    """All rows with the panel at address `weight`."""
    out, out_bytes = a.out + panel * PANEL * 4, a.panels * PANEL * 4
    multiply_panel(element, a.tokens, a.x, a.x_bytes, weight, a.inputs, a.panel_bytes, out, out_bytes)
