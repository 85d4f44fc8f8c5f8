"""Machines that are not here: files of the kernel under a folder, a probe that answers from a table, and facts."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.doctor.device import Driver, Link
from app.doctor.examination import DeviceFacts, Facts
from app.doctor.host import Disk, Numa, Package, Pinned, Versions
from app.doctor.probe import GPU, Copies, CopyRates, MachineProbe, TorchBuild
from app.machine.memory import HostMemory

GIB = 1 << 30
ADDRESS = "0000:41:00.0"
H100 = GPU(0, "NVIDIA H100 80GB HBM3", 9, 0, 80 * GIB, 79 * GIB, ADDRESS)
CUDA_TORCH = TorchBuild("2.11.0+cu130", "13.0", ("sm_80", "sm_90", "sm_100"), 1, None)
CPU_TORCH = TorchBuild("2.11.0+cpu", None, (), 0, "PyTorch is built without CUDA")


def rates(gigabytes_per_second: float, slowest: float = 0.98) -> CopyRates:
    """Steady ones, unless told that the slowest copy had a smaller share of the median."""
    median = gigabytes_per_second * 1e9
    return CopyRates(median, slowest * median, 1.01 * median)


def copies(to_device: float = 55.0, from_device: float = 54.0) -> Copies:
    """In GB/s."""
    return Copies(256 << 20, rates(to_device), rates(from_device))


@dataclass
class FakeProbe(MachineProbe):
    """`gpu_says`, `pin_says`, `copies_say`: with which error the device refuses that."""

    torch: TorchBuild = CUDA_TORCH
    driver: str | None = "13.0"
    card: GPU = H100
    gpu_says: str | None = None
    pin_says: str | None = None
    copies_say: str | None = None
    measured: Copies = field(default_factory=copies)

    def build(self) -> TorchBuild:
        return self.torch

    def driver_cuda(self) -> str | None:
        return self.driver

    def gpu(self, index: int) -> GPU:
        assert index < self.torch.gpu_count
        _refuse(self.gpu_says)
        return self.card

    def pin(self, index: int, num_bytes: int) -> None:
        assert num_bytes > 0
        _refuse(self.pin_says)

    def gpu_copies(self, index: int, buffer_bytes: int) -> Copies:
        _refuse(self.pin_says or self.copies_say)
        return self.measured

    def cpu_copies(self, buffer_bytes: int) -> Copies:
        return self.measured


def _refuse(message: str | None) -> None:
    if message is not None:
        raise RuntimeError(f"{message}\nCompile with TORCH_USE_CUDA_DSA")


class Kernel:
    """Writes `sys` and `proc` below a folder, as Linux shows them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        """The kernel ends its files with a newline."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def nodes(self, *cpus: str) -> None:
        for node, cpulist in enumerate(cpus):
            self.write(f"sys/devices/system/node/node{node}/cpulist", cpulist)

    def process(self, cpus: str, memory: str) -> None:
        lines = ("Name:\tpython", "Cpus_allowed:\tff", f"Cpus_allowed_list:\t{cpus}", f"Mems_allowed_list:\t{memory}")
        self.write("proc/self/status", "\n".join(lines))

    def card(self, address: str = ADDRESS, *, node: int = -1, link: str = "32.0 16", fastest: str = "32.0 16") -> None:
        """An NVIDIA GPU on the bus; links are gigatransfers per second and lanes."""
        device = f"sys/bus/pci/devices/{address}"
        self.write(f"{device}/vendor", "0x10de")
        self.write(f"{device}/class", "0x030200")
        self.write(f"{device}/numa_node", str(node))
        for which, text in (("current", link), ("max", fastest)):
            speed, width = text.split()
            self.write(f"{device}/{which}_link_speed", f"{speed} GT/s PCIe")
            self.write(f"{device}/{which}_link_width", width)


def healthy_facts() -> Facts:
    """Of an H100 that a server is bound to."""
    return Facts(
        cpu="AMD EPYC (64 logical CPUs)",
        nvidia_cards=1,
        torch=CUDA_TORCH,
        driver=Driver("580.159.04", "13.0"),
        device=DeviceFacts(H100, None, Pinned(256 << 20, None), copies(), None, Link(32.0, 16, 32.0, 16)),
        numa=Numa((0, 1), 1, (1,), (0, 1)),
        numactl=True,
        memlock_bytes=None,
        host=HostMemory(512 * GIB, 500 * GIB, None),
        disk=Disk("/var/djinn", "/var", True, "ext4", 500 * GIB, 1000 * GIB),
        versions=Versions(
            "3.12.3",
            "0.1.0",
            {
                "torch": Package("2.11.0+cu130", "<3,>=2.11"),
                "triton": Package("3.6.0", "==3.6.0"),
                "transformers": Package("5.17.0", "<6,>=5.17"),
            },
        ),
    )


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path / "root")
