"""What the doctor asks PyTorch and the driver about this machine's devices, their answers as plain values, and the one
form of what it finds.

PyTorch takes seconds to load, so it is imported by the questions that need it: the answers are judged without it, and a
machine without a driver is told apart without it.
"""

import ctypes
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

import numpy as np


class Status(StrEnum):
    """`warning`: it works, but figures that are taken here will mislead. `error`: it does not work."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """remedy: what to do about it, None where there is nothing to do."""

    name: str
    status: Status
    summary: str
    remedy: str | None = None


def ok(name: str, summary: str) -> Finding:
    """Nothing to do."""
    return Finding(name, Status.OK, summary)


def warning(name: str, summary: str, remedy: str) -> Finding:
    """It works, but not as it could."""
    return Finding(name, Status.WARNING, summary, remedy)


def error(name: str, summary: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(name, Status.ERROR, summary, remedy)


REPEATS = 10
LIBRARY = "libcuda.so.1"
"""The driver's own, which also answers where PyTorch can use no GPU."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The PyTorch that is installed, and what it makes of this machine's GPUs.

    cuda: the CUDA version it is built for, None without CUDA. architectures: what it has kernels for, such as "sm_90".
    problem: why it can use no GPU, in its own words; None if it can.
    """

    version: str
    cuda: str | None
    architectures: tuple[str, ...]
    gpu_count: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class GPU:
    """One CUDA device. major, minor: its compute capability. pci_address: as sysfs writes it, "0000:41:00.0"."""

    index: int
    name: str
    major: int
    minor: int
    total_bytes: int
    free_bytes: int
    pci_address: str


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Bytes per second of repeated copies in one direction."""

    median: float
    slowest: float
    fastest: float


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of `buffer_bytes` between host and device memory; on a CPU both are the same memory."""

    buffer_bytes: int
    to_device: CopyRates
    from_device: CopyRates


class MachineProbe:
    """The questions. Where the device refuses, `gpu`, `pin` and `gpu_copies` raise PyTorch's `RuntimeError`, of which
    running out of memory is one.
    """

    def build(self) -> TorchBuild:
        """The installed PyTorch."""
        import torch

        problem = None if torch.version.cuda else "PyTorch is built without CUDA"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of cards that are too old for it, which is judged from the facts
                if problem is None:
                    torch.cuda.init()
        except RuntimeError as error:
            problem = first_line(error)
        return TorchBuild(
            version=torch.__version__,
            cuda=torch.version.cuda,
            architectures=tuple(torch.cuda.get_arch_list()),
            gpu_count=torch.cuda.device_count() if problem is None else 0,
            problem=problem,
        )

    def driver_cuda(self) -> str | None:
        """The newest CUDA version that the driver can run; None without a driver."""
        return newest_cuda()

    def gpu(self, index: int) -> GPU:
        """One of the `gpu_count` devices."""
        import torch

        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        domain, bus, device = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
        return GPU(
            index=index,
            name=properties.name,
            major=properties.major,
            minor=properties.minor,
            total_bytes=total,
            free_bytes=free,
            pci_address=f"{domain:04x}:{bus:02x}:{device:02x}.0",
        )

    def pin(self, index: int, num_bytes: int) -> None:
        """Allocate pinned host memory for a device, and let it go."""
        import torch

        with torch.cuda.device(index):
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def gpu_copies(self, index: int, buffer_bytes: int) -> Copies:
        """Copies between pinned host memory and a device, timed by the device."""
        import torch

        def copy(source: torch.Tensor, target: torch.Tensor) -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            milliseconds: float = begin.elapsed_time(end)
            return milliseconds / 1000

        with torch.cuda.device(index):
            host = torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True)
            there = torch.empty(buffer_bytes, dtype=torch.uint8, device="cuda")
            return _measure(host, there, copy)

    def cpu_copies(self, buffer_bytes: int) -> Copies:
        """Copies within host memory on the calling thread, as KV moves are where the device is a CPU."""

        def copy(source: Any, target: Any) -> float:
            begin = time.perf_counter()
            np.copyto(target, source)
            return time.perf_counter() - begin

        # Written, so that the memory is really there.
        return _measure(np.ones(buffer_bytes, np.uint8), np.ones(buffer_bytes, np.uint8), copy)


def newest_cuda(load: Callable[[str], Any] = ctypes.CDLL) -> str | None:
    """The newest CUDA version that the driver can run, such as "13.0"; None without a driver.

    `cuDriverGetVersion` of the CUDA driver API gives 1000 x major + 10 x minor.
    """
    number = ctypes.c_int()
    try:
        failed = load(LIBRARY).cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def _measure(host: Any, device: Any, copy: Callable[[Any, Any], float]) -> Copies:
    """Copies of all of one buffer of bytes to the other, and back; `copy` gives the seconds of one."""

    def rates(source: Any, target: Any) -> CopyRates:
        copy(source, target)  # not kept: the first copy finds links asleep and pages unmapped
        seconds = [copy(source, target) for _ in range(REPEATS)]
        return CopyRates(*(host.nbytes / each for each in (median(seconds), max(seconds), min(seconds))))

    return Copies(host.nbytes, to_device=rates(host, device), from_device=rates(device, host))


def first_line(error: Exception) -> str:
    """Of what PyTorch says, which goes on with advice for its developers."""
    return str(error).partition("\n")[0]
