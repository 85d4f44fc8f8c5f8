"""Memory that is large and zero."""

from __future__ import annotations

import logging
import math
import mmap
import time

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

TOUCHED_AT_ONCE = 1 << 30
PROGRESS_SECONDS = 2.0


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
