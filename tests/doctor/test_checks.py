"""What the doctor reads of a machine and says of each part: whether it is well, what is wrong, and what to do."""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.doctor.device import (
    Driver,
    Link,
    check_capability,
    check_copies,
    check_cpu,
    check_driver,
    check_gpu,
    check_link,
    cpu_name,
    nvidia_cards,
    read_link,
    read_release,
)
from app.doctor.host import (
    Disk,
    Numa,
    Package,
    Pinned,
    Versions,
    check_device_memory,
    check_disk,
    check_host_memory,
    check_memlock,
    check_numa,
    check_pinned,
    check_versions,
    read_disk,
    read_numa,
)
from app.doctor.probe import Finding, MachineProbe, Status, newest_cuda
from app.machine.memory import HostMemory, MemoryLimit
from tests.doctor.conftest import ADDRESS, CPU_TORCH, CUDA_TORCH, GIB, H100, Kernel, copies, rates

OK, WARNING, ERROR = Status.OK, Status.WARNING, Status.ERROR
MIB = 1 << 20
NO_DRIVER = replace(CUDA_TORCH, gpu_count=0, problem="Found no NVIDIA driver on your system.")
DRIVER = Driver("580.159.04", "13.0")
LINK = Link(32.0, 16, 32.0, 16)
PINNED, NOT_PINNED = Pinned(256 * MIB, None), Pinned(256 * MIB, "CUDA error: out of memory")
DISK = Disk("/var/djinn", "/var", True, "ext4", 50 * GIB, 100 * GIB)


def compiled_for(capability: str, architectures: str) -> Finding:
    """A GPU with a PyTorch that has kernels for these."""
    major, minor = map(int, capability.split("."))
    return check_capability(replace(H100, major=major, minor=minor), architectures.split())


def installed(name: str, package: Package, device: str = "cuda:0") -> Finding:
    """With nothing else, and Djinn from its source."""
    _, finding = check_versions(Versions("3.12.3", None, {name: package}), "13.0", device)
    return finding


@pytest.mark.parametrize(
    ("finding", "status", "says", "remedy"),
    [
        (check_cpu("cpu", "AMD EPYC", CPU_TORCH, cards=1), OK, "AMD EPYC", ""),
        (check_cpu("auto", "AMD EPYC", CPU_TORCH, cards=1), WARNING, "without CUDA", "PyTorch with CUDA"),
        (check_cpu("auto", "AMD EPYC", NO_DRIVER, cards=1), WARNING, "Found no NVIDIA driver", "--gpus all"),
        (check_gpu("cuda:0", CUDA_TORCH, H100, None), OK, "cuda:0: NVIDIA H100 80GB HBM3", ""),
        (check_gpu("cuda:5", CPU_TORCH, None, None), ERROR, "without CUDA", "PyTorch with CUDA"),
        (check_gpu("cuda:5", NO_DRIVER, None, None), ERROR, "Found no NVIDIA driver", "CUDA_VISIBLE_DEVICES"),
        (check_gpu("cuda:5", replace(CUDA_TORCH, gpu_count=2), None, None), ERROR, "not here: cuda:0, cuda:1", "name"),
        (check_gpu("cuda:0", CUDA_TORCH, None, "CUDA error: busy"), ERROR, "CUDA error: busy", "nvidia-smi"),
        (check_driver(DRIVER, "12.6"), OK, "580.159.04, for CUDA 13.0", ""),
        (check_driver(Driver(None, "12.8"), "13.0"), ERROR, "unknown release, for CUDA 12.8; ", "PyTorch for CUDA 12"),
        (check_driver(Driver(None, None), "13.0"), ERROR, "", "install the NVIDIA driver"),
        (compiled_for("9.0", "sm_80 sm_90"), OK, "9.0", ""),
        (compiled_for("8.9", "sm_80 sm_90"), OK, "", ""),  # a later minor version
        (compiled_for("9.0", "sm_90a"), OK, "", ""),
        (compiled_for("12.0", "sm_90 compute_90"), OK, "", ""),  # compiled when it is loaded
        (compiled_for("7.5", "sm_75"), WARNING, "no bfloat16", "--dtype float16"),
        (compiled_for("12.0", "sm_80 sm_90"), ERROR, "sm_80, sm_90", "install a PyTorch"),
        (compiled_for("9.1", "sm_90a"), ERROR, "", ""),
        (compiled_for("12.0", "sm_100f"), ERROR, "", ""),
        (check_copies(copies(55, 54), None, LINK)[0], OK, "55.0 GB/s, 87% of the PCIe link", ""),
        (check_copies(copies(55, 20), None, LINK)[1], WARNING, "32% of the PCIe link", "NUMA"),
        (
            check_copies(replace(copies(), to_device=rates(55, slowest=0.4)), None, LINK)[0],
            WARNING,
            "from 22.0 GB/s to 55.5 GB/s",
            "stop what else runs",
        ),
        (check_copies(None, "CUDA error: uncorrectable ECC error", LINK)[0], ERROR, "ECC error", "nvidia-smi -q"),
        (check_device_memory(H100), OK, "79.0 GiB free of 80.0 GiB", ""),
        (check_device_memory(replace(H100, free_bytes=40 * GIB)), WARNING, "40.0 GiB free", "nvidia-smi"),
        (check_device_memory(replace(H100, free_bytes=GIB // 2)), ERROR, "512.0 MiB free", "nvidia-smi"),
        (check_host_memory(HostMemory(64 * GIB, GIB // 2, None)), ERROR, "", "stop other processes"),
        (
            check_host_memory(HostMemory(64 * GIB, 60 * GIB, MemoryLimit(16 * GIB, 12 * GIB))),
            WARNING,
            "12.0 GiB free of 64.0 GiB",
            "--kv-host",
        ),
        (check_host_memory(HostMemory(64 * GIB, 60 * GIB, MemoryLimit(63 * GIB, 62 * GIB))), OK, "", ""),
        (check_memlock(200 * GIB, PINNED, 100 * GIB), OK, "", ""),  # more than there is memory
        (check_memlock(8 * MIB, PINNED, 100 * GIB), OK, "", ""),  # it was pinned all the same
        (check_memlock(GIB, PINNED, 100 * GIB), WARNING, "1.0 GiB", "ulimit -l unlimited"),
        (check_pinned(NOT_PINNED), ERROR, "CUDA error: out of memory", "ulimit -l unlimited"),
        (check_disk(DISK), OK, "50.0 GiB free of 100.0 GiB for /var/djinn", ""),
        (check_disk(replace(DISK, file_system="tmpfs")), WARNING, "gone after a restart", "--state-dir"),
        (check_disk(replace(DISK, free_bytes=GIB // 2)), WARNING, "512.0 MiB free", "make room"),
        (installed("torch", Package("2.11.0+cu130", "<3,>=2.11")), OK, "2.11.0+cu130, for CUDA 13.0", ""),
        (installed("triton", Package(None, None), "cpu"), OK, "not needed on a CPU", ""),
        (installed("triton", Package(None, None)), ERROR, "", "pip install 'triton'"),
        (installed("torch", Package("2.10.0", "<3,>=2.11")), ERROR, "", "pip install 'torch<3,>=2.11'"),
    ],
)
def test_a_finding_is_well_or_has_its_cause_and_its_remedy(
    finding: Finding, status: Status, says: str, remedy: str
) -> None:
    assert (finding.status, finding.remedy is None) == (status, status is OK)
    assert says in finding.summary
    assert remedy in (finding.remedy or "")


def test_cards_processor_and_driver_are_read_from_the_kernel(kernel: Kernel) -> None:
    assert (nvidia_cards(kernel.root), read_release(kernel.root)) == (0, None)
    for address in ("0000:41:00.0", "0000:42:00.0", "0000:42:00.1", "0000:00:02.0"):
        kernel.card(address)
    kernel.write("sys/bus/pci/devices/0000:42:00.1/class", "0x040300")  # its sound
    kernel.write("sys/bus/pci/devices/0000:00:02.0/vendor", "0x8086")
    assert nvidia_cards(kernel.root) == 2
    kernel.write("proc/cpuinfo", "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9654\n")
    assert cpu_name(kernel.root).startswith("AMD EPYC 9654 (")
    kernel.write("sys/module/nvidia/version", "580.159.04")
    assert read_release(kernel.root) == "580.159.04"


def test_a_link_should_run_as_its_card_can_and_a_virtual_machine_need_not_tell(kernel: Kernel) -> None:
    kernel.card()
    finding = check_link(read_link(kernel.root, ADDRESS))
    assert (finding.status, finding.summary) == (OK, "32 GT/s x16, 63.0 GB/s each way")
    for speed, standard in ((2.5, 4.0e9), (5.0, 8.0e9), (8.0, 15.75e9)):  # of sixteen lanes
        assert Link(speed, 16, speed, 16).bytes_per_second == pytest.approx(standard, rel=1e-3)
    for slow in ("32.0 8", "16.0 16"):
        kernel.card(link=slow)
        finding = check_link(read_link(kernel.root, ADDRESS))
        assert finding.status is WARNING
        assert "the card can do 32 GT/s x16" in finding.summary
        assert "slot" in (finding.remedy or "")
    for untold in ("Unknown 16", "32.0 0"):
        kernel.card(link=untold)
        assert read_link(kernel.root, ADDRESS) is None
    assert check_link(None).status is OK


TWO = ("0-3,8-11", "4-7,12-15")
ON_1, ON_GPU = "numactl --cpunodebind=1 --membind=1 djinn", " djinn serve --device cuda:0"


@pytest.mark.parametrize(
    ("nodes", "cpus", "memory", "node", "status", "remedies"),
    [
        (TWO, "0-15", "0-1", 1, WARNING, (ON_1, ON_GPU)),
        (TWO, "4-6", "0-1", 1, OK, ()),
        (TWO, "0-3", "0-1", 1, WARNING, ("--all --cpunodebind=1 ", "--cpuset-mems=1")),
        (TWO, "0-15", "0-1", -1, WARNING, ("nvidia-smi topo -m", "numactl --cpunodebind=N --membind=N")),
        (("0-7",), "0-7", "0", -1, OK, ()),
        (TWO, "2-7", "0-1", None, WARNING, ("numactl --cpunodebind=0 --membind=0 djinn serve --device cpu",)),
    ],
)
def test_a_server_should_be_on_the_gpus_node_or_on_one(
    kernel: Kernel,
    nodes: tuple[str, ...],
    cpus: str,
    memory: str,
    node: int | None,
    status: Status,
    remedies: tuple[str, ...],
) -> None:
    """`node`: the GPU's; None for a server on the CPU."""
    kernel.nodes(*nodes)
    kernel.process(cpus, memory)
    kernel.card(node=-1 if node is None else node)
    address, device = (None, "cpu") if node is None else (ADDRESS, "cuda:0")
    numa = read_numa(kernel.root, address)
    finding = check_numa(numa, device, numactl=True)
    assert finding.status is status
    assert all(each in (finding.remedy or "") for each in remedies)
    if remedies:
        assert "install numactl, then: " in (check_numa(numa, device, numactl=False).remedy or "")


def test_a_sandbox_that_hides_what_the_process_may_use_lets_it_use_all(kernel: Kernel) -> None:
    kernel.nodes("0-3", "4-7")
    kernel.write("proc/self/status", "Name:\tpython")
    assert read_numa(kernel.root, None) == Numa((0, 1), None, (0, 1), (0, 1))
    assert read_numa(kernel.root, ADDRESS).gpu_node is None, "the kernel does not list it"


def test_a_folder_is_judged_by_where_it_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_disk(Path("state")).folder == str(tmp_path)
    disk = read_disk(tmp_path / "state" / "djinn")
    assert (disk.folder, disk.writable) == (str(tmp_path), True)
    assert disk.total_bytes == shutil.disk_usage(tmp_path).total
    assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.touch(0o755)
    finding = check_disk(read_disk(file / "state"))
    assert finding.status is ERROR
    assert f"Djinn cannot write to {file}" in finding.summary
    if sys.platform == "linux":
        for mounted in ("/dev/shm", "/proc"):
            said = subprocess.run(["stat", "-f", "-c", "%T", mounted], capture_output=True, text=True, check=True)
            assert read_disk(Path(mounted) / "djinn").file_system == said.stdout.strip()


# The probe of this machine, and of machines that PyTorch is made to speak of.


def driver(version: int, *, fails: int = 0) -> Callable[[str], Any]:
    """A loader of a driver library that answers like NVIDIA's."""

    def answer(pointer: Any) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = version
        return fails

    return lambda name: SimpleNamespace(cuDriverGetVersion=answer)


@pytest.mark.parametrize(("number", "version"), [(13000, "13.0"), (12080, "12.8"), (12010, "12.1")])
def test_the_driver_tells_the_newest_cuda_that_it_can_run(number: int, version: str) -> None:
    assert newest_cuda(driver(number)) == version


def test_a_driver_that_is_missing_or_fails_has_no_version() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert newest_cuda(missing) is None
    assert newest_cuda(driver(0, fails=100)) is None


def test_a_gpu_is_described_in_cudas_words_and_why_there_is_none_in_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    build = MachineProbe().build()
    assert (build.gpu_count, build.problem) == (0, "Found no NVIDIA driver on your system.")
    properties = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=0x1F
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70, 80))
    gpu = MachineProbe().gpu(3)
    assert (gpu.index, gpu.name, gpu.major, gpu.minor) == (3, "NVIDIA H100", 9, 0)
    assert (gpu.free_bytes, gpu.total_bytes) == (70, 80)
    assert gpu.pci_address == "0001:c1:1f.0"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_what_pytorch_says_and_copies_faster_than_a_network_would() -> None:
    probe = MachineProbe()
    gpu, newest = probe.gpu(0), probe.driver_cuda()
    assert gpu.name == torch.cuda.get_device_name(0)
    assert (gpu.major, gpu.minor) == torch.cuda.get_device_capability(0)
    assert 0 < gpu.free_bytes <= gpu.total_bytes
    assert newest is not None
    assert torch.version.cuda is not None
    assert int(newest.split(".")[0]) >= int(torch.version.cuda.split(".")[0])
    probe.pin(0, 64 * MIB)
    measured = probe.gpu_copies(0, 64 * MIB)
    for found in (measured.to_device, measured.from_device):
        assert 1e9 < found.slowest <= found.median <= found.fastest < 1e12
