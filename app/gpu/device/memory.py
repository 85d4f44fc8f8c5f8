"""Memory of the device and of the host: how much there is, and large allocations of it."""

import logging
import math
import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.machine.memory import read_host_memory
from app.machine.units import size

logger = logging.getLogger(__name__)

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

    def reset_peak(self) -> None:
        """Begin to look for the most that is held at once."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """The most that has been held at once since `reset_peak`, less what is still held now. Held is what the
        allocator has reserved, not the tensors in it: what rounding and fragments cost is as little to be had for KV.
        """
        most = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        return most - torch.cuda.memory_reserved(self._device)


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU the machine gives it page by page as it is written, in large pages where it has them:
    a budget that is not used costs nothing, and a server with a large one starts at once.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


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
    """Whether memory was asked for and not granted, by a device or by the host. PyTorch's allocator on a CPU raises a
    plain RuntimeError.
    """
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
