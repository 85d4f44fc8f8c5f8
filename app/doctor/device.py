"""Which device it is about, and whether PyTorch can use it."""

import os
import platform
import re
from pathlib import Path

from app.doctor.findings import Finding, error, ok, warning
from app.doctor.probe import GPU, TorchBuild
from app.domain.errors import FieldOutOfRange
from app.machine.files import read, read_field

NAME = "device"
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
        return warning(NAME, f"cpu, though there is an NVIDIA GPU here: {build.problem}", remedy)
    return ok(NAME, f"cpu: {cpu}")


def check_gpu(device: str, build: TorchBuild, gpu: GPU | None, problem: str | None) -> Finding:
    """Whether `device` is there. `problem`: what it said instead of the facts in `gpu`."""
    if gpu is not None:
        return ok(NAME, f"{device}: {gpu.name}")
    if build.cuda is None:
        return error(NAME, f"PyTorch cannot use {device}: {build.problem}", INSTALL_CUDA_TORCH)
    if build.gpu_count == 0:
        return error(NAME, f"PyTorch cannot use {device}: {build.problem}", LOOK_FURTHER)
    if problem is None:
        there = ", ".join(f"cuda:{index}" for index in range(build.gpu_count))
        return error(NAME, f"{device} is not here: {there}", "name one that is; CUDA_VISIBLE_DEVICES hides the others")
    return error(
        NAME,
        f"{device} does not answer: {problem}",
        "nvidia-smi shows its state: another process may have it to itself (compute mode), or it must be reset",
    )
