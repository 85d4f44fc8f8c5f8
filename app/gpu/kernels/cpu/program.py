"""Kernels that are launched together, with one call: the threads stay between them, and spin where they wait.

To wake PyTorch's threads and to come back to Python costs more than a kernel that works on one token. At the end of a
kernel a thread waits for those that have drawn a part of it, but for no others: one whose core does something else is
not missed, and finds its way when it comes back.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numba import types
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from app.gpu.kernels.cpu.compile import c_function, inlined
from app.gpu.kernels.cpu.intrinsics import call, fetch_add, fetch_subtract, load, pointer, relax, store
from app.gpu.kernels.cpu.openmp import run_on_torch_threads


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel's address, and its arguments as it finds them."""

    function: int
    arguments: ctypes.Structure


class _Arguments(ctypes.Structure):
    """What the kernel reads. `operations` is `[count, 2]` int64: addresses of a function and of its arguments. `inside`
    is `[count, 8]` int64, a cache line each, whose first number says how many threads are in the operation. `done` is
    at most the number of operations that are.
    """

    _fields_: ClassVar = [(name, ctypes.c_int64) for name in ("done", "operations", "inside", "count")]


_ARGUMENTS = np.dtype(_Arguments)
_ALIGNMENT = 64
"""Bytes: arguments of two kernels share no cache line."""
_SPINS = 2048
"""Looks at another thread, some 50 us, until a thread offers it the core: there may be more threads than cores."""
_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())
"""POSIX `sched_yield`."""


class Program:
    """Launches in their order. The owner keeps the memory that they work on."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._kinds = [type(each.arguments) for each in launches]
        sizes = [-(-ctypes.sizeof(each.arguments) // _ALIGNMENT) * _ALIGNMENT for each in launches]
        self._starts = np.cumsum([0, *sizes])
        self._fresh = np.zeros(self._starts[-1], np.uint8)
        for start, each in zip(self._starts.tolist(), launches, strict=False):
            self._fresh[start : start + ctypes.sizeof(each.arguments)] = np.frombuffer(bytes(each.arguments), np.uint8)
        self._fields: dict[str, NDArray[np.int64]] = {}
        memory = np.empty(len(self._fresh) + _ALIGNMENT, np.uint8)
        self._used = memory[-memory.ctypes.data % _ALIGNMENT :][: len(self._fresh)]
        places = self._used.ctypes.data + self._starts[:-1]
        functions = np.array([each.function for each in launches], np.int64)
        self._operations = np.ascontiguousarray(np.stack((functions, places), axis=1))
        self._inside = np.zeros((len(launches), _ALIGNMENT // 8), np.int64)

    def set(self, field: str, number: int) -> None:
        """Have all launches whose arguments have an int64 of that name find `number` there from now on."""
        if field not in self._fields:
            self._fields[field] = self._find(field)
        self._fresh.view(np.int64)[self._fields[field]] = number

    def _find(self, field: str) -> NDArray[np.int64]:
        """Where in the arguments of all launches the field is, counted in int64."""
        places = [
            start + getattr(kind, field).offset
            for start, kind in zip(self._starts.tolist(), self._kinds, strict=False)
            if hasattr(kind, field)
        ]
        return np.array(places, np.int64) // 8

    def run(self, first: int, end: int) -> None:
        """Run launches `[first, end)` on PyTorch's threads, each when the one before it is done. A thread may come to a
        launch of which nothing is left, or not at all.
        """
        span = slice(self._starts[first], self._starts[end])
        self._used[span] = self._fresh[span]
        arguments = _Arguments(
            operations=self._operations[first:].ctypes.data, inside=self._inside[first:].ctypes.data, count=end - first
        )
        run_on_torch_threads(_compiled().address, arguments)


@functools.cache
def _compiled() -> Any:
    """The kernel as a C function of the address of an `_Arguments`."""
    return c_function(_run_operations)


def _run_operations(address: int) -> None:
    a = carray(pointer(address), 1, _ARGUMENTS)[0]
    operations = carray(pointer(a.operations), (a.count, 2), np.int64)
    index = 0
    while index < a.count:
        inside = a.inside + index * _ALIGNMENT
        fetch_add(inside)
        call(operations[index, 0], operations[index, 1])  # all that is to be done has been drawn when it returns
        fetch_subtract(inside)
        _wait_until_left(inside)
        index += 1
        done = load(address)
        if done > index:
            index = done
        else:
            store(address, index)  # another thread may have stored more: then the next to look goes a longer way


@inlined
def _wait_until_left(inside: Any) -> None:
    spins = 0
    while load(inside) > 0:
        relax()
        spins += 1
        if spins == _SPINS:
            spins = 0
            _sched_yield()
