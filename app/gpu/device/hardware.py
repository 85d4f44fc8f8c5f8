"""The device that a model runs on: which one, its data types, its memory, and whether it still works after an error.

Some errors of CUDA stay: an illegal address, a failed assertion or a memory error leaves the process's context broken,
and each later call fails with the same error (CUDA runtime API, "sticky" errors). Only another process can go on.
"""

import ctypes
import logging
import math
import mmap
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.domain.values import AUTO_DTYPES
from app.machine.files import size
from app.machine.memory import read_host_memory

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {**_DTYPES, "float8": torch.float8_e4m3fn}


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a CUDA device. Raises FieldOutOfRange for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise FieldOutOfRange(f"device is {name!r}; use auto, cpu, cuda or cuda:N", param="device") from None
    known = device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count())
    if not known:
        count = torch.cuda.device_count()
        raise FieldOutOfRange(f"device is {name!r}; this machine has cpu and {count} CUDA devices", param="device")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on CPU and bfloat16 on CUDA."""
    return _DTYPES[AUTO_DTYPES[device.type] if name == "auto" else name]


def choose_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of keys and values: `auto` is the model's `dtype`. Raises FieldOutOfRange for one that is no smaller."""
    kept = dtype if name == "auto" else _KV_DTYPES[name]
    if kept is dtype or kept.itemsize < dtype.itemsize:
        return kept
    computes = dtype_name(dtype)
    raise FieldOutOfRange(
        f"kv_dtype must be auto, {computes}, or smaller than {computes}, in which the model computes; got {name}",
        param="kv_dtype",
    )


def dtype_name(dtype: torch.dtype) -> str:
    """As it is written outside of PyTorch: "bfloat16", "float8"."""
    return str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")


class DeviceLost(RuntimeError):
    """The device answers no more in this process."""


def check_alive(device: torch.device, error: Exception) -> None:
    """Raise DeviceLost if `error` is the device's and a trivial computation fails too."""
    if not isinstance(error, torch.AcceleratorError):
        return
    try:
        probe(device)
    except RuntimeError as still:
        raise DeviceLost(f"{device} has failed and does not recover: {still}") from error


def probe(device: torch.device) -> None:
    """Compute something, and wait for it."""
    torch.ones(1, device=device).add_(1).item()


LARGE_BYTES = 2 << 20
"""A large page."""
TOUCHED_AT_ONCE = 1 << 30
PROGRESS_SECONDS = 2.0


class DeviceMemory:
    """A CUDA device's memory, in bytes. What PyTorch keeps cached goes back to the device before each answer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """All of it, used or free."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """What no process uses, nor the device's own modules and contexts."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_of(self, work: Callable[[], None]) -> int:
        """The most that is held at once while `work` runs, less what is held after it. Held is what the allocator has
        reserved, not the tensors in it: what rounding and fragments cost is as little to be had for KV.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        most = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        return most - torch.cuda.memory_reserved(self._device)


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU the machine gives it page by page as it is written, in large pages where it has them:
    a budget that is not used costs nothing, and a server with a large one starts at once.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(_new_pages(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def _new_pages(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class LargeMemory:
    """Memory on the host for large results, which others get when nothing refers to it any more. New memory comes as
    zeros, page by page: where a kernel only fills it once, that takes as long as the kernel. One thread takes.
    """

    def __init__(self, kept_bytes: int) -> None:
        """At most so many are kept for others."""
        self._kept_bytes = kept_bytes
        self._free = list[tuple[mmap.mmap, Hashable]]()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, filled: Hashable) -> tuple[Tensor, bool]:
        """A tensor with any content, and whether it is blank: 0 everywhere but at the places that the caller fills.
        `filled` names these places. Memory is blank if it is new, or was last taken for the same places.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LARGE_BYTES // 4:
            return torch.empty(shape, dtype=dtype), False
        memory, is_blank = self._take(-(-nbytes // LARGE_BYTES) * LARGE_BYTES, filled)
        owner = (ctypes.c_uint8 * len(memory)).from_buffer(memory)
        weakref.finalize(owner, self._give_back, memory, filled).atexit = False
        return torch.frombuffer(owner, dtype=dtype, count=math.prod(shape)).view(shape), is_blank

    def _take(self, nbytes: int, filled: Hashable) -> tuple[mmap.mmap, bool]:
        fitting = [each for each in tuple(self._free) if len(each[0]) == nbytes]
        for each in sorted(fitting, key=lambda each: each[1] != filled):
            with suppress(ValueError):  # it has just gone
                self._free.remove(each)
                return each[0], each[1] == filled
        return _new_pages(nbytes), True

    def _give_back(self, memory: mmap.mmap, filled: Hashable) -> None:
        """On any thread."""
        self._free.append((memory, filled))
        while sum(len(each) for each, _ in tuple(self._free)) > self._kept_bytes:
            with suppress(IndexError):
                self._free.pop(0)


def touch(memory: Tensor) -> None:
    """Have the machine give all of `zeroed` memory now: PyTorch's threads do that together, where CUDA, which pins only
    what is there, would take page after page. Tens of GiB take seconds; the log says how far it is.
    """
    pieces = memory.view(torch.uint8).view(-1).split(TOUCHED_AT_ONCE)
    told = time.perf_counter()
    for done, piece in enumerate(pieces):
        if time.perf_counter() - told > PROGRESS_SECONDS:
            told = time.perf_counter()
            logger.info("taken %d of %d GiB of host memory", done, len(pieces))
        piece.zero_()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was not granted, by a device or the host. PyTorch's allocator on a CPU raises a RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


@contextmanager
def allocating(name: str, nbytes: int) -> Iterator[None]:
    """Allocate the `nbytes` bytes that the setting `name` has led to; FieldOutOfRange if they are not granted."""
    try:
        yield
    except (MemoryError, OSError, torch.OutOfMemoryError) as error:
        free = size(read_host_memory().free_bytes)
        message = f"{name}: no memory for {size(nbytes)} ({error}); {free} of host memory are free"
        raise FieldOutOfRange(message, param=name) from error
