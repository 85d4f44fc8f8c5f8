"""Reading a file into memory on the threads that PyTorch computes with.

On a CPU nobody but its cores copies. A thread that copies beside those that compute takes a core from one of them, for
which the others then wait at the end of every operator; all of them together copy, and then compute, in less time.
"""

import ctypes
import functools
from typing import Any, ClassVar

import numpy as np
from numba import types
from numba.np.numpy_support import carray
from torch import Tensor

from app.gpu.kernels.cpu.compile import c_function, inlined
from app.gpu.kernels.cpu.intrinsics import fetch_add, pointer
from app.gpu.kernels.cpu.openmp import run_on_torch_threads

PART_BYTES = 1 << 18
"""Bytes that a thread reads at a time: a part of its second-level cache."""


class _Arguments(ctypes.Structure):
    """What the kernel reads; `next_part` counts the parts that threads have drawn, `short` is 1 if one ended early."""

    _fields_: ClassVar = [
        (name, ctypes.c_int64) for name in ("next_part", "short", "file", "offset", "target", "nbytes", "part_bytes")
    ]


_ARGUMENTS = np.dtype(_Arguments)
_pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uintp, types.int64))
"""POSIX `pread`."""


def read_on_torch_threads(file: int, offset: int, target: Tensor) -> bool:
    """Fill `target`, `[bytes]` uint8 on the host, with the bytes of the open `file` from `offset` on. Returns whether
    all of them were there; if not, the next read of them fails with the reason.
    """
    arguments = _Arguments(
        file=file, offset=offset, target=target.data_ptr(), nbytes=target.numel(), part_bytes=PART_BYTES
    )
    run_on_torch_threads(_compiled().address, arguments)
    return not arguments.short


@functools.cache
def _compiled() -> Any:
    """The kernel as a C function of the address of an `_Arguments`."""
    return c_function(_read_parts)


def _read_parts(address: int) -> None:
    """Draw parts until none is left, or one is short."""
    a = carray(pointer(address), 1, _ARGUMENTS)
    while a[0].short == 0:
        start = fetch_add(address) * a[0].part_bytes
        if start >= a[0].nbytes:
            return
        nbytes = min(a[0].part_bytes, a[0].nbytes - start)
        if not read_part(a[0].file, a[0].offset + start, a[0].target + start, nbytes):
            a[0].short = 1


@inlined
def read_part(file: Any, offset: Any, target: Any, nbytes: Any) -> bool:
    """Read `nbytes` of the open `file` from `offset` on to address `target`. Returns whether they were there."""
    done = 0
    while done < nbytes:
        count = _pread(np.int32(file), np.uintp(target + done), np.uintp(nbytes - done), offset + done)
        if count <= 0:
            return False
        done += count
    return True
