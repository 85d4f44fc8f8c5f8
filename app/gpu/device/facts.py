"""What the doctor learns through PyTorch, as plain values: judging them takes no torch."""

from dataclasses import dataclass
from typing import Protocol


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


class ProbeFailed(Exception):
    """The device refused; the message is its own, in one line."""


class DeviceProbe(Protocol):
    """What is asked of PyTorch and the driver. `gpu`, `pin` and `gpu_copies` raise `ProbeFailed`."""

    def build(self) -> TorchBuild:
        """The installed PyTorch."""

    def driver_cuda(self) -> str | None:
        """The newest CUDA version that the driver can run; None without a driver."""

    def gpu(self, index: int) -> GPU:
        """One of the `gpu_count` devices."""

    def pin(self, index: int, num_bytes: int) -> None:
        """Allocate pinned host memory for a device, and let it go."""

    def gpu_copies(self, index: int, buffer_bytes: int) -> Copies:
        """Time copies between pinned host memory and a device."""

    def cpu_copies(self, buffer_bytes: int) -> Copies:
        """Time copies within host memory, on one thread."""
