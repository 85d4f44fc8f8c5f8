"""Running a compiled function on the OpenMP threads that PyTorch computes with.

Two thread pools on the same cores fight: an OpenMP worker spins for milliseconds after its last region. So a kernel
that runs between PyTorch's operators runs on PyTorch's threads. `GOMP_parallel` is the entry point that GCC's own code
calls, part of libgomp's ABI and offered by LLVM's and Intel's OpenMP too; `import torch` makes it a global symbol.
"""

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import torch

_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
if _parallel is not None:
    _parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    _parallel.restype = None
_SOFT_PAUSE = 1
"""`omp_pause_soft` of the OpenMP 5.0 API."""


def release_threads() -> None:
    """End the OpenMP threads that the calling thread has used; its next parallel operator starts new ones.

    Threads of two callers are more than the cores. libgomp then stops to spin between operators and puts every
    thread to sleep instead, also those of the caller that works: measured with a model loaded on one thread and run
    on another, 30 tokens a second for one stream; with this call in between 52.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_SOFT_PAUSE)


@contextmanager
def lone_threads() -> Iterator[ThreadPoolExecutor]:
    """As many threads as PyTorch computes with, on each of which its operators have no other. For many small operators.

    OpenMP's threads meet after each operator, and there wait for the one that the machine has taken off its core.
    Measured, a 135M GGUF on two cores: beside four busy processes its weights are packed in 1.4 s instead of 22 to 38.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as threads:
            yield threads
    finally:
        torch.set_num_threads(count)


class Recorder(Protocol):
    """Takes launches of a thread, which are then not run."""

    def launched(self, function: int, arguments: ctypes.Structure) -> None:
        """See `run_on_torch_threads`."""
        ...


class _Recorders(threading.local):
    current: Recorder | None = None


_recorders = _Recorders()


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Give `recorder` what this thread launches within the context."""
    _recorders.current = recorder
    try:
        yield
    finally:
        _recorders.current = None


def run_on_torch_threads(function: int, arguments: ctypes.Structure) -> None:
    """Call the C function `void f(void *)` at address `function` with `arguments`, once on each of PyTorch's threads.

    Returns when every call has; the GIL is released meanwhile. The calls share the work among themselves, by an atomic
    counter for instance: where PyTorch was built without such an OpenMP there is one call, on the calling thread.
    """
    if _recorders.current is not None:
        _recorders.current.launched(function, arguments)
    elif _parallel is None:
        _Function(function)(ctypes.addressof(arguments))
    else:
        _parallel(function, ctypes.addressof(arguments), torch.get_num_threads(), 0)
