"""Everything that is found out about the machine, before any of it is judged."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from app.doctor.copies import LEAST_BYTES, buffer_bytes
from app.doctor.device import cpu_name, nvidia_cards
from app.doctor.disk import Disk, read_disk
from app.doctor.driver import Driver, read_release
from app.doctor.link import Link, read_link
from app.doctor.memlock import Pinned, read_memlock
from app.doctor.numa import Numa, read_numa
from app.doctor.probe import GPU, Copies, MachineProbe, ProbeFailed, TorchBuild
from app.doctor.versions import Versions, read_versions
from app.machine.memory import HostMemory, read_host_memory
from app.machine.units import size


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What only the device itself can tell.

    problem: why a GPU did not answer. copies: None if they were not possible, for the reason in copies_problem; they
    are not tried where nothing can be pinned. link: None where the machine does not tell, or not the truth.
    """

    gpu: GPU | None = None
    problem: str | None = None
    pinned: Pinned | None = None
    copies: Copies | None = None
    copies_problem: str | None = None
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes in bytes. nvidia_cards: on the PCI bus. memlock_bytes: None if unlimited. numactl: whether it is installed.
    disk: None without a state directory.
    """

    cpu: str
    nvidia_cards: int
    torch: TorchBuild
    driver: Driver
    device: DeviceFacts
    numa: Numa
    numactl: bool
    memlock_bytes: int | None
    host: HostMemory
    disk: Disk | None
    versions: Versions


def gather(device: str, build: TorchBuild, state_dir: Path | None, probe: MachineProbe, root: Path) -> Facts:
    """`device`: `cpu` or `cuda:N`. `root`: where the kernel's `sys` and `proc` are."""
    host = read_host_memory(root)
    found = _ask_device(device, build, host.free_bytes, probe, root)
    return Facts(
        cpu=cpu_name(root),
        nvidia_cards=nvidia_cards(root),
        torch=build,
        driver=Driver(read_release(root), probe.driver_cuda()),
        device=found,
        numa=read_numa(root, None if found.gpu is None else found.gpu.pci_address),
        numactl=shutil.which("numactl") is not None,
        memlock_bytes=read_memlock(),
        host=host,
        disk=None if state_dir is None else read_disk(state_dir),
        versions=read_versions(),
    )


def _ask_device(device: str, build: TorchBuild, host_free: int, probe: MachineProbe, root: Path) -> DeviceFacts:
    if device == "cpu":
        copies, problem = _measure(probe, None, buffer_bytes(host_free, host_free))
        return DeviceFacts(copies=copies, copies_problem=problem)
    index = int(device.removeprefix("cuda:"))
    if index >= build.gpu_count:
        return DeviceFacts()
    try:
        gpu = probe.gpu(index)
    except ProbeFailed as failure:
        return DeviceFacts(problem=str(failure))
    num_bytes = buffer_bytes(host_free, gpu.free_bytes)
    pinned = Pinned(num_bytes, _pin(probe, index, num_bytes))
    copies, problem = _measure(probe, index, num_bytes) if pinned.problem is None else (None, None)
    return DeviceFacts(gpu, None, pinned, copies, problem, _true_link(read_link(root, gpu.pci_address), copies))


def _true_link(link: Link | None, copies: Copies | None) -> Link | None:
    """Virtual machines make links up, and some GPUs have a better way to host memory than PCIe: copies prove it."""
    if link is None or copies is None:
        return link
    fastest = max(copies.to_device.median, copies.from_device.median)
    return None if fastest > link.bytes_per_second else link


def _pin(probe: MachineProbe, index: int, num_bytes: int) -> str | None:
    try:
        probe.pin(index, num_bytes)
    except ProbeFailed as failure:
        return str(failure)
    return None


def _measure(probe: MachineProbe, index: int | None, num_bytes: int) -> tuple[Copies | None, str | None]:
    """`index`: of the GPU, None for a CPU."""
    if num_bytes < LEAST_BYTES:
        return None, f"there is room for buffers of {size(num_bytes)} only"
    try:
        return (probe.cpu_copies(num_bytes) if index is None else probe.gpu_copies(index, num_bytes)), None
    except ProbeFailed as failure:
        return None, str(failure)
