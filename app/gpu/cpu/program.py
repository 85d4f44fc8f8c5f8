"""Kernels that are launched together, with one call: the threads stay between them and meet at barriers that spin.

To wake PyTorch's threads and to come back to Python costs more than a kernel that works on one token. A thread that has
nothing to do in a kernel, because the others have drawn it all, waits at its end.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numba import types
from numba.np.numpy_support import carray

from app.gpu.cpu.compile import c_function, inlined
from app.gpu.cpu.intrinsics import call, call_for_number, fetch_add, load, pointer, relax
from app.gpu.cpu.openmp import run_on_torch_threads, team_size_function


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel's address, and its arguments as it finds them."""

    function: int
    arguments: bytes


class _Arguments(ctypes.Structure):
    """What the kernel reads. `operations` is `[count, 2]` int64: addresses of a function and of its arguments.
    `arrived` counts how often a thread has come to a barrier. `team_size` is as of `team_size_function`.
    """

    _fields_: ClassVar = [(name, ctypes.c_int64) for name in ("arrived", "operations", "count", "team_size")]


_ARGUMENTS = np.dtype(_Arguments)
_ALIGNMENT = 64
"""Bytes: arguments of two kernels share no cache line."""
_SPINS = 2048
"""Looks at a barrier, some 50 us, until a thread offers its core to others: there may be more threads than cores."""
_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())
"""POSIX `sched_yield`."""


class Program:
    """Launches in their order. Whoever makes one keeps the memory that they work on."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        sizes = [-(-len(each.arguments) // _ALIGNMENT) * _ALIGNMENT for each in launches]
        self._starts = np.cumsum([0, *sizes])
        self._fresh = np.zeros(self._starts[-1], np.uint8)
        for start, each in zip(self._starts.tolist(), launches, strict=False):
            self._fresh[start : start + len(each.arguments)] = np.frombuffer(each.arguments, np.uint8)
        memory = np.empty(len(self._fresh) + _ALIGNMENT, np.uint8)
        self._used = memory[-memory.ctypes.data % _ALIGNMENT :][: len(self._fresh)]
        places = self._used.ctypes.data + self._starts[:-1]
        functions = np.array([each.function for each in launches], np.int64)
        self._operations = np.ascontiguousarray(np.stack((functions, places), axis=1))

    def run(self, first: int, end: int) -> None:
        """Run launches `[first, end)`, each on all of PyTorch's threads, each when the one before it is done."""
        span = slice(self._starts[first], self._starts[end])
        self._used[span] = self._fresh[span]
        arguments = _Arguments(
            operations=self._operations[first:].ctypes.data, count=end - first, team_size=team_size_function()
        )
        run_on_torch_threads(_compiled().address, arguments)


@functools.cache
def _compiled() -> Any:
    """The kernel as a C function of the address of an `_Arguments`."""
    return c_function(_run_operations)


def _run_operations(address: int) -> None:
    a = carray(pointer(address), 1, _ARGUMENTS)[0]
    team = 1
    if a.team_size != 0:
        team = call_for_number(a.team_size)
    operations = carray(pointer(a.operations), (a.count, 2), np.int64)
    for index in range(a.count):
        call(operations[index, 0], operations[index, 1])
        fetch_add(address)
        _wait_for(address, (index + 1) * team)


@inlined
def _wait_for(arrived: Any, count: Any) -> None:
    spins = 0
    while load(arrived) < count:
        relax()
        spins += 1
        if spins == _SPINS:
            spins = 0
            _sched_yield()
