"""Asking PyTorch and the driver about this machine's devices."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from app.gpu.device.copies import measure_memory_copies, measure_pinned_copies
from app.gpu.device.driver import newest_cuda
from app.gpu.device.facts import GPU, Copies, ProbeFailed, TorchBuild


class MachineProbe:
    """The `DeviceProbe` of this machine."""

    def build(self) -> TorchBuild:
        problem = _why_no_gpu()
        return TorchBuild(
            version=torch.__version__,
            cuda=torch.version.cuda,
            architectures=tuple(torch.cuda.get_arch_list()),
            gpu_count=torch.cuda.device_count() if problem is None else 0,
            problem=problem,
        )

    def driver_cuda(self) -> str | None:
        return newest_cuda()

    def gpu(self, index: int) -> GPU:
        with _failures():
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
        with _failures(), torch.cuda.device(index):
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def gpu_copies(self, index: int, buffer_bytes: int) -> Copies:
        with _failures():
            return measure_pinned_copies(torch.device("cuda", index), buffer_bytes)

    def cpu_copies(self, buffer_bytes: int) -> Copies:
        return measure_memory_copies(buffer_bytes)


def _why_no_gpu() -> str | None:
    if torch.version.cuda is None:
        return "PyTorch is built without CUDA"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cards that are too old for it, which is judged from the facts
            torch.cuda.init()
    except RuntimeError as error:
        return _first_line(error)
    return None


@contextmanager
def _failures() -> Iterator[None]:
    """`ProbeFailed` in place of PyTorch's errors, of which running out of memory is one."""
    try:
        yield
    except RuntimeError as error:
        raise ProbeFailed(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
