"""A device that is not there: kernels are compiled for it where our own code launches them, and nothing runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

THREADS_OF_A_WARP = 32


class _AbsentDevice:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self._capability, THREADS_OF_A_WARP)

    def get_current_device(self) -> int:
        return self._capability  # a number of its own: Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def absent_device(capability: int, note: Callable[[str, Any], None]) -> Iterator[None]:
    """Within the block, each launch compiles its kernel for compute capability `capability` (90: sm_90) and tells
    `note` the kernel's name and what Triton has compiled. One device per process.
    """
    launch = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        note(function.fn.__name__, launch(function, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(_AbsentDevice(capability))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = launch
