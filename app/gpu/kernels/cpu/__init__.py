"""Kernels of a CPU, in Numba: the threads of PyTorch, on which they run, and what a start says of compiling them.

Two thread pools on the same cores fight: an OpenMP worker spins for milliseconds after its last region. So a kernel
that runs between PyTorch's operators runs on PyTorch's threads. `GOMP_parallel` is the entry point that GCC's own code
calls, part of libgomp's ABI and offered by LLVM's and Intel's OpenMP too; `import torch` makes it a global symbol.

Nothing here imports Numba: a server on a GPU loads this file too.
"""

import ctypes
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from app.machine.files import counted

logger = logging.getLogger(__name__)

_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
if _parallel is not None:
    _parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    _parallel.restype = None
_SOFT_PAUSE = 1
"""`omp_pause_soft` of the OpenMP 5.0 API."""

Launch = tuple[int, ctypes.Structure]
"""A function's address, and its arguments as it finds them."""
_record: ContextVar[Callable[[Launch], None] | None] = ContextVar("record", default=None)
_told: list[list[float]] = []
"""Seconds of each kernel that was compiled, for each start that is under way."""


def run_on_torch_threads(function: int, arguments: ctypes.Structure) -> None:
    """Call the C function `void f(void *)` at address `function` with `arguments`, once on each of PyTorch's threads,
    without the GIL. The calls share the work: where PyTorch was built without such an OpenMP there is one.
    """
    record = _record.get()
    if record is not None:
        record((function, arguments))
    elif _parallel is None:
        _Function(function)(ctypes.addressof(arguments))
    else:
        _parallel(function, ctypes.addressof(arguments), torch.get_num_threads(), 0)


@contextmanager
def recorded_by(record: Callable[[Launch], None]) -> Iterator[None]:
    """Give `record` what this thread launches within the context."""
    before = _record.set(record)
    try:
        yield
    finally:
        _record.reset(before)


def release_threads() -> None:
    """End the OpenMP threads that the calling thread has used; its next parallel operator starts new ones. Threads of
    two callers are more than the cores, so libgomp puts all to sleep between operators: measured with a model loaded on
    one thread and run on another, 30 tokens a second for one stream; with this call in between 52.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_SOFT_PAUSE)


@contextmanager
def lone_threads() -> Iterator[ThreadPoolExecutor]:
    """As many threads as PyTorch computes with, on each of which its operators have no other. For many small operators:
    OpenMP's threads meet after each, and there wait for the one that has lost its core. Measured, a 135M GGUF on two
    cores: beside four busy processes its weights are packed in 1.4 s instead of 22 to 38.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as threads:
            yield threads
    finally:
        torch.set_num_threads(count)


@contextmanager
def telling_of_compilation() -> Iterator[None]:
    """Within this context, log before the first kernel is compiled, and at its end how long all of them took."""
    seconds: list[float] = []
    _told.append(seconds)
    try:
        yield
    finally:
        _told.pop()
        if seconds:
            logger.info("compiled %s in %.0f s", counted(len(seconds), "kernel"), sum(seconds))


@contextmanager
def compiling() -> Iterator[None]:
    """A kernel is compiled within this context."""
    if _told and not _told[-1]:
        logger.info("compiling kernels for this processor: it takes a minute or two, the first time")
    began = time.perf_counter()
    yield
    for seconds in _told:
        seconds.append(time.perf_counter() - began)
