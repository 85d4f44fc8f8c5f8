"""The device: its driver, whether this PyTorch has kernels for it, its link, and the measured copies."""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.doctor.probe import GPU, Copies, CopyRates, Finding, TorchBuild, error, ok, warning
from app.domain.errors import FieldOutOfRange
from app.machine.files import MIB, rate, read, read_field

DEVICE = "device"
NVIDIA = "0x10de"
DISPLAY = "0x03"
"""The PCI base class of graphics cards, compute-only ones too."""
INSTALL_CUDA_TORCH = "install a PyTorch with CUDA: https://pytorch.org/get-started/locally/"
LOOK_FURTHER = "see the driver below, and whether CUDA_VISIBLE_DEVICES hides the GPU; a container needs --gpus all"


def choose_device(requested: str, gpu_count: int) -> str:
    """`cpu` or `cuda:N`, whether it is there or not; `auto` is what `djinn serve` makes of it.

    Raises `FieldOutOfRange` for anything but auto, cpu, cuda and cuda:N.
    """
    asked = re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", requested)
    if asked is None:
        raise FieldOutOfRange(f"device is {requested!r}; use auto, cpu, cuda or cuda:N", param="device")
    if requested == "cpu" or (requested == "auto" and gpu_count == 0):
        return "cpu"
    return f"cuda:{int(asked[1] or 0)}"


def nvidia_cards(root: Path) -> int:
    """NVIDIA GPUs on the PCI bus, whether or not anything can use them."""
    cards = (root / "sys/bus/pci/devices").glob("*")
    return sum(read(card / "vendor") == NVIDIA and (read(card / "class") or "").startswith(DISPLAY) for card in cards)


def cpu_name(root: Path) -> str:
    """Such as "AMD EPYC (2 logical CPUs)"; the machine type where the kernel does not tell."""
    name = read_field(root / "proc/cpuinfo", "model name") or platform.machine()
    return f"{name} ({os.cpu_count()} logical CPUs)"


def check_cpu(requested: str, cpu: str, build: TorchBuild, cards: int) -> Finding:
    """A CPU is always there; but was it meant?"""
    if requested == "auto" and cards:
        remedy = INSTALL_CUDA_TORCH if build.cuda is None else LOOK_FURTHER
        return warning(DEVICE, f"cpu, though there is an NVIDIA GPU here: {build.problem}", remedy)
    return ok(DEVICE, f"cpu: {cpu}")


def check_gpu(device: str, build: TorchBuild, gpu: GPU | None, problem: str | None) -> Finding:
    """Whether `device` is there. `problem`: what it said instead of the facts in `gpu`."""
    if gpu is not None:
        return ok(DEVICE, f"{device}: {gpu.name}")
    if build.cuda is None:
        return error(DEVICE, f"PyTorch cannot use {device}: {build.problem}", INSTALL_CUDA_TORCH)
    if build.gpu_count == 0:
        return error(DEVICE, f"PyTorch cannot use {device}: {build.problem}", LOOK_FURTHER)
    if problem is None:
        there = ", ".join(f"cuda:{index}" for index in range(build.gpu_count))
        return error(DEVICE, f"{device} is not here: {there}", "name one of these; CUDA_VISIBLE_DEVICES hides others")
    return error(
        DEVICE,
        f"{device} does not answer: {problem}",
        "nvidia-smi shows its state: another process may have it to itself (compute mode), or it must be reset",
    )


DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Driver:
    """release: of the kernel module, where it is told. cuda: the newest CUDA it can run, None without a driver."""

    release: str | None
    cuda: str | None


def read_release(root: Path) -> str | None:
    """Of the kernel module, such as "580.159.04"; a sandbox may hide it."""
    return read(root / "sys/module/nvidia/version")


def check_driver(driver: Driver, torch_cuda: str | None) -> Finding:
    """`torch_cuda`: the version that PyTorch is built for. Within one major version an older driver will do
    (CUDA Compatibility, "Minor Version Compatibility").
    """
    if driver.cuda is None:
        return error(
            DRIVER,
            "there is none that answers (libcuda.so.1)",
            "install the NVIDIA driver; start a container with --gpus all (NVIDIA container toolkit)",
        )
    summary = f"{driver.release or 'of unknown release'}, for CUDA {driver.cuda}"
    if torch_cuda is not None and _major(driver.cuda) < _major(torch_cuda):
        return error(
            DRIVER,
            f"{summary}; PyTorch needs one for CUDA {torch_cuda}",
            f"update the driver, or install a PyTorch for CUDA {_major(driver.cuda)}",
        )
    return ok(DRIVER, summary)


def _major(version: str) -> int:
    return int(version.partition(".")[0])


CAPABILITY = "compute_capability"
BFLOAT16 = (8, 0)
"""The first compute capability that multiplies bfloat16 in hardware."""


def check_capability(gpu: GPU, architectures: Sequence[str]) -> Finding:
    """`architectures`: what PyTorch is built for."""
    capability = (gpu.major, gpu.minor)
    summary = f"{gpu.major}.{gpu.minor}"
    if not any(_runs_on(architecture, capability) for architecture in architectures):
        return error(
            CAPABILITY,
            f"{summary}, for which this PyTorch has no kernels: {', '.join(architectures) or 'it has none at all'}",
            "install a PyTorch that is built for this GPU: https://pytorch.org/get-started/locally/",
        )
    if capability < BFLOAT16:
        return warning(CAPABILITY, f"{summary}, which has no bfloat16 in hardware", "serve with --dtype float16")
    return ok(CAPABILITY, summary)


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Machine code (`sm_XY`) runs on the same major version from its minor version up, with the suffix `a` on that
    version alone; PTX (`compute_XY`) on anything newer. CUDA C++ Programming Guide, "Binary Compatibility" and
    "PTX Compatibility".
    """
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if parts is None:
        return False
    built = (int(parts[2]), int(parts[3]))
    if parts[4] == "a":
        return built == capability
    if parts[1] == "compute" and not parts[4]:
        return built <= capability
    return built[0] == capability[0] and built <= capability


LINK = "pcie_link"


@dataclass(frozen=True, slots=True)
class Link:
    """Gigatransfers per second and lane, and lanes: as it runs, and the most that the card can do."""

    speed: float
    width: int
    max_speed: float
    max_width: int

    @property
    def bytes_per_second(self) -> float:
        """Payload each way: 8 bits travel as 10 up to 5 GT/s, then 128 as 130 (PCI Express Base Specification 3.0,
        4.2); from 64 GT/s on a few percent less than that gives.
        """
        return self.speed * 1e9 * self.width / 8 * (0.8 if self.speed < 8 else 128 / 130)


def read_link(root: Path, pci_address: str) -> Link | None:
    """None where the machine does not tell, as many virtual ones. An idle link sleeps: read it right after a copy."""
    folder = root / "sys/bus/pci/devices" / pci_address
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    numbers = [re.match(r"\d+(?:\.\d+)?", read(folder / name) or "") for name in names]
    speed, width, max_speed, max_width = (float(number[0]) if number else 0.0 for number in numbers)
    if not (speed and width and max_speed and max_width):
        return None
    return Link(speed, int(width), max_speed, int(max_width))


def check_link(link: Link | None) -> Finding:
    """Whether it runs as wide and as fast as the card can."""
    if link is None:
        return ok(LINK, "the machine does not tell")
    summary = f"{link.speed:g} GT/s x{link.width}, {rate(link.bytes_per_second)} each way"
    if (link.speed, link.width) == (link.max_speed, link.max_width):
        return ok(LINK, summary)
    return warning(
        LINK,
        f"{summary}; the card can do {link.max_speed:g} GT/s x{link.max_width}",
        "use a slot with all lanes of the processor, look for a limit in the firmware, reseat the card or its riser",
    )


COPIES = "copies"
BUFFER_BYTES = 256 * MIB
"""Larger than the caches, and than what a transfer needs to reach full speed."""
LEAST_BYTES = 16 * MIB
"""A copy of less says nothing about the link."""
LINK_SHARE = 0.7
"""Pinned copies reach 80 to 90 % of the link: packet headers take the rest."""
STEADY_SHARE = 0.7
"""Of the median, for the slowest of the copies. On a quiet machine it is above 0.9."""


def buffer_bytes(host_free: int, device_free: int) -> int:
    """As much as there is plenty of."""
    return min(BUFFER_BYTES, host_free // 8, device_free // 8)


def check_copies(copies: Copies | None, problem: str | None, link: Link | None) -> list[Finding]:
    """One line for each direction. `problem`: why nothing could be measured."""
    if copies is None:
        return [
            error(
                COPIES,
                f"the copy bandwidth could not be measured: {problem}",
                "free memory on host and device; if there is enough, see nvidia-smi -q and dmesg for hardware errors",
            )
        ]
    return [_check("copy_to_device", copies.to_device, link), _check("copy_from_device", copies.from_device, link)]


def _check(name: str, measured: CopyRates, link: Link | None) -> Finding:
    summary = rate(measured.median)
    if link is not None:
        share = measured.median / link.bytes_per_second
        summary += f", {share:.0%} of the PCIe link"
        if share < LINK_SHARE:
            return warning(
                name,
                summary,
                "bind to the GPU's NUMA node (numa, above); stop what else copies; on bare metal, boot with iommu=pt",
            )
    if measured.slowest < STEADY_SHARE * measured.median:
        return warning(
            name,
            f"{summary}; unsteady, from {rate(measured.slowest)} to {rate(measured.fastest)}",
            "stop what else runs on the machine, then measure",
        )
    return ok(name, summary)
