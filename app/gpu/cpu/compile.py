"""How the CPU kernels are compiled, and what several of them use."""

import functools
import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import llvmlite.binding as llvm
import numpy as np
import torch
from numba import njit, types
from numba.core import config
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.runtime.nrt import rtsys

from app.gpu.cpu.compilations import COMPILATIONS

ELEMENTS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}
"""What stands for a tensor's dtype inside a kernel; see `intrinsics.widen`."""

POOL_ELEMENTS = {**ELEMENTS, torch.float8_e4m3fn: np.uint8}
"""The same of a pool of KV."""

KERNEL_ROOMS = ("attention", "cpu", "linear")

_OPTIONS: dict[str, Any] = {"fastmath": True, "error_model": "numpy", "boundscheck": False}

P = ParamSpec("P")
R = TypeVar("R")


def compiled_features() -> frozenset[str]:
    """Instruction sets that kernels are compiled for, in LLVM's words: the processor's, or those that Numba is told in
    NUMBA_CPU_FEATURES. Numba's cache keeps the machine code of each apart.
    """
    told: Any = vars(config)["CPU_FEATURES"]
    if told is not None:
        return frozenset(word[1:] for word in told.split(",") if word.startswith("+"))
    return frozenset(name for name, is_there in llvm.get_host_cpu_features().items() if is_there)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile into the kernel, where constant arguments stay constant. Never called from Python."""
    compiled = njit(forceinline=True, **_OPTIONS)(function)
    return cast("Callable[P, R]", compiled)


def c_function(kernel: Callable[[int], None]) -> Any:
    """Compile `kernel`, which takes the address of its arguments; the result's `address` is a C function.

    Compiling takes up to some seconds; the machine code is kept in Numba's cache, beside the file or in the user's
    cache directory, and compiled again at every start where neither can be written to.
    """
    compiled = _Kernel(kernel, ((types.int64,), types.void), locals={}, options=dict(_OPTIONS))
    with suppress(RuntimeError):  # nowhere to keep it
        compiled._cache = _KernelCache(kernel)  # type: ignore[attr-defined, no-untyped-call]
    compiled.compile()
    return compiled


class _Kernel(CFunc):
    """One whose compilation counts, unless it is in the cache."""

    def _compile_uncached(self) -> Any:
        untyped: Any = super()
        with COMPILATIONS.counting():
            return untyped._compile_uncached()


class _KernelCache(FunctionCache):
    """Numba's knows a kernel by its own file and by what it closes over. What others of our files give to be compiled
    into it could change, and the old machine code run on data that is laid out in another way.
    """

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Numba's own begins with all that a compilation may use: half a second of a start. A compiled kernel needs its
        runtime alone.
        """
        runtime: Any = rtsys
        runtime.initialize(target_context)
        untyped: Any = super()
        with untyped._guard_against_spurious_io_errors():
            return untyped._load_overload(signature, target_context)

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return *super()._index_key(signature, codegen), kernel_sources()  # type: ignore[no-untyped-call]


@functools.cache
def kernel_sources() -> str:
    """A digest of all files that kernels are made of."""
    digest = hashlib.sha256()
    for path in kernel_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kernel_files() -> list[Path]:
    """Every file of the rooms that kernels are written in, so that a new file counts without being listed."""
    engine = Path(__file__).parents[1]
    return sorted(path for room in KERNEL_ROOMS for path in (engine / room).rglob("*.py"))


@inlined
def exp2(x: Any) -> Any:
    """2 to the `x`, for `-126 <= x <= 127`, to about 2e-7 (Cephes' exp2f)."""
    whole = np.rint(x)
    part = x - whole
    y = np.float32(1.535336188319500e-4)
    y = y * part + np.float32(1.339887440266574e-3)
    y = y * part + np.float32(9.618437357674640e-3)
    y = y * part + np.float32(5.550332471162809e-2)
    y = y * part + np.float32(2.402264791363012e-1)
    y = y * part + np.float32(6.931472028550421e-1)
    y = y * part + np.float32(1)
    return y * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
