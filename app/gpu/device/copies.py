"""How fast bytes get from host memory to the device and back: the limit that KV moves are held against."""

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.gpu.device.facts import Copies, CopyRates

REPEATS = 10


def measure_pinned_copies(device: torch.device, buffer_bytes: int) -> Copies:
    """Copies between pinned host memory and `device`, timed by the device. Raises `RuntimeError` as CUDA does."""
    with torch.cuda.device(device):
        host = torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
        return Copies(
            buffer_bytes,
            to_device=_rates(buffer_bytes, lambda: _device_seconds(host, there)),
            from_device=_rates(buffer_bytes, lambda: _device_seconds(there, host)),
        )


def measure_memory_copies(buffer_bytes: int) -> Copies:
    """Copies between two buffers of host memory on the calling thread, as KV moves are where the device is a CPU."""
    one, other = (np.ones(buffer_bytes, np.uint8) for _ in range(2))  # written, so that the memory is really there
    return Copies(
        buffer_bytes,
        to_device=_rates(buffer_bytes, lambda: _host_seconds(one, other)),
        from_device=_rates(buffer_bytes, lambda: _host_seconds(other, one)),
    )


def _rates(buffer_bytes: int, copy: Callable[[], float]) -> CopyRates:
    copy()  # not kept: the first copy finds links asleep and pages unmapped
    seconds = [copy() for _ in range(REPEATS)]
    return CopyRates(
        median=buffer_bytes / median(seconds),
        slowest=buffer_bytes / max(seconds),
        fastest=buffer_bytes / min(seconds),
    )


def _device_seconds(source: Tensor, target: Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000


def _host_seconds(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> float:
    begin = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - begin
