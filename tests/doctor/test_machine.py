"""Memory, its lock, the disk, and the versions of what is installed."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from app.doctor.disk import Disk, check_disk, read_disk
from app.doctor.findings import Finding, Status
from app.doctor.memlock import Pinned, check_memlock, check_pinned
from app.doctor.memory import check_device_memory, check_host_memory
from app.doctor.versions import Package, Versions, check_versions, read_versions
from app.machine.cgroup import MemoryLimit, read_memory_limit
from app.machine.memory import HostMemory, read_host_memory
from tests.doctor.machines import GIB, H100, Kernel


@pytest.mark.parametrize(("free", "status"), [(40 * GIB, Status.WARNING), (GIB // 2, Status.ERROR)])
def test_a_gpu_that_others_fill_is_to_be_freed(free: int, status: Status) -> None:
    assert check_device_memory(H100).summary == "79.0 GiB free of 80.0 GiB"
    assert {check_device_memory(card).status for card in (H100, None)} == {Status.OK}
    finding = check_device_memory(replace(H100, free_bytes=free))
    assert finding.status is status
    assert "nvidia-smi" in (finding.remedy or "")


def test_the_memory_is_this_machines(kernel: Kernel) -> None:
    memory = read_host_memory(kernel.root)
    assert memory.total_bytes == psutil.virtual_memory().total
    assert memory.limit is None
    assert 0 < memory.free_bytes == memory.available_bytes < memory.total_bytes


def test_a_full_machine_is_an_error_and_a_container_that_may_use_less_than_is_free_a_warning() -> None:
    finding = check_host_memory(HostMemory(64 * GIB, GIB // 2, None))
    assert finding.status is Status.ERROR
    assert "stop other processes" in (finding.remedy or "")
    finding = check_host_memory(HostMemory(64 * GIB, 60 * GIB, MemoryLimit(16 * GIB, 12 * GIB)))
    assert finding.status is Status.WARNING
    assert "12.0 GiB free of 64.0 GiB" in finding.summary
    assert "--kv-host" in (finding.remedy or "")
    assert check_host_memory(HostMemory(64 * GIB, 60 * GIB, MemoryLimit(63 * GIB, 62 * GIB))).status is Status.OK
    assert check_host_memory(HostMemory(64 * GIB, 60 * GIB, MemoryLimit(16 * GIB, 0))).status is Status.ERROR


def test_the_tightest_of_nested_limits_counts(kernel: Kernel) -> None:
    """Pages of files that nobody uses are as good as free."""
    kernel.write("proc/self/cgroup", "0::/pods/djinn")
    for group, limit, usage in (("pods", 32 * GIB, 30 * GIB), ("pods/djinn", 16 * GIB, 4 * GIB)):
        kernel.write(f"sys/fs/cgroup/{group}/memory.max", str(limit))
        kernel.write(f"sys/fs/cgroup/{group}/memory.current", str(usage))
        kernel.write(f"sys/fs/cgroup/{group}/memory.stat", f"anon 1\ninactive_file {GIB}\nactive_file 7")
    assert read_memory_limit(kernel.root, 64 * GIB) == MemoryLimit(32 * GIB, 3 * GIB)
    kernel.write("sys/fs/cgroup/pods/memory.max", "max")
    assert read_memory_limit(kernel.root, 64 * GIB) == MemoryLimit(16 * GIB, 13 * GIB)


def test_a_container_that_sees_only_its_own_group_finds_its_limit(kernel: Kernel) -> None:
    kernel.write("proc/self/cgroup", "0::/")
    kernel.write("sys/fs/cgroup/memory.max", str(8 * GIB))
    kernel.write("sys/fs/cgroup/memory.current", str(GIB))
    assert read_memory_limit(kernel.root, 64 * GIB) == MemoryLimit(8 * GIB, 7 * GIB)


@pytest.mark.parametrize(("limit", "found"), [(8 * GIB, MemoryLimit(8 * GIB, 7 * GIB)), (0x7FFFFFFFFFFFF000, None)])
def test_the_first_version_of_control_groups_is_read_too(kernel: Kernel, limit: int, found: MemoryLimit | None) -> None:
    kernel.write("proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/job\n0::/")
    kernel.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(limit))
    kernel.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", str(2 * GIB))
    kernel.write("sys/fs/cgroup/memory/job/memory.stat", f"inactive_file 3\ntotal_inactive_file {GIB}")
    assert read_memory_limit(kernel.root, 64 * GIB) == found


MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels have other limits")
def test_the_limit_is_that_of_the_shell() -> None:
    script = "from app.doctor.memlock import read_memlock; print(read_memlock())"
    command = ["bash", "-c", f"ulimit -l 64 && '{sys.executable}' -c '{script}'"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{64 * 1024}\n"


@pytest.mark.parametrize(
    ("limit", "pinned"),
    [
        (None, Pinned(256 * MIB, None)),
        (200 * GIB, Pinned(256 * MIB, None)),  # more than there is memory
        (8 * MIB, None),  # a CPU, where nothing is pinned
        (8 * MIB, Pinned(256 * MIB, None)),  # it was pinned all the same
    ],
)
def test_a_limit_that_does_not_bind_is_well(limit: int | None, pinned: Pinned | None) -> None:
    assert check_memlock(limit, pinned, 100 * GIB).status is Status.OK


@pytest.mark.parametrize("pinned", [Pinned(256 * MIB, "out of memory"), Pinned(256 * MIB, None)])
def test_a_limit_that_may_bind_is_to_be_raised(pinned: Pinned) -> None:
    finding = check_memlock(GIB, pinned, 100 * GIB)
    assert finding.status is Status.WARNING
    assert "1.0 GiB" in finding.summary
    assert "ulimit -l unlimited" in (finding.remedy or "")


def test_memory_that_cannot_be_pinned_is_an_error_in_the_devices_words() -> None:
    finding = check_pinned(Pinned(256 * MIB, "CUDA error: out of memory"))
    assert finding.status is Status.ERROR
    assert "CUDA error: out of memory" in finding.summary
    assert "ulimit -l unlimited" in (finding.remedy or "")
    assert check_pinned(Pinned(256 * MIB, None)).status is Status.OK


GOOD_DISK = Disk("/var/djinn", "/var", True, "ext4", 50 * GIB, 100 * GIB)


def test_a_folder_that_is_not_there_yet_is_judged_by_where_it_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_disk(Path("state")).folder == str(tmp_path)
    disk = read_disk(tmp_path / "state" / "djinn")
    assert disk.folder == str(tmp_path)
    assert disk.writable
    assert disk.total_bytes == shutil.disk_usage(tmp_path).total
    assert not list(tmp_path.iterdir())


def test_a_place_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(0o755)
    finding = check_disk(read_disk(file / "state"))
    assert finding.status is Status.ERROR
    assert f"Djinn cannot write to {file}" in finding.summary
    assert "--state-dir" in (finding.remedy or "")


@pytest.mark.parametrize(
    ("disk", "says", "remedy"),
    [
        (replace(GOOD_DISK, file_system="tmpfs"), "gone after a restart", "--state-dir"),
        (replace(GOOD_DISK, file_system="nfs4"), "SQLite", "--state-dir"),
        (replace(GOOD_DISK, free_bytes=GIB // 2), "512.0 MiB free", "make room"),
    ],
)
def test_a_disk_that_will_disappoint_is_a_warning(disk: Disk, says: str, remedy: str) -> None:
    assert check_disk(GOOD_DISK).summary == "50.0 GiB free of 100.0 GiB for /var/djinn"
    assert {check_disk(each).status for each in (GOOD_DISK, None)} == {Status.OK}
    finding = check_disk(disk)
    assert finding.status is Status.WARNING
    assert says in finding.summary
    assert remedy in (finding.remedy or "")


@pytest.mark.skipif(sys.platform != "linux", reason="GNU stat")
@pytest.mark.parametrize("folder", ["/dev/shm", "/proc"])
def test_the_file_system_is_what_stat_says(folder: str) -> None:
    said = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True)
    assert read_disk(Path(folder) / "djinn").file_system == said.stdout.strip()


GOOD = Versions(
    "3.12.3",
    None,
    {
        "torch": Package("2.11.0+cu130", None),
        "triton": Package("3.6.0", "==3.6.0"),
        "transformers": Package("5.17.0", "<6,>=5.17"),
    },
)


def find(name: str, versions: Versions, device: str = "cuda:0") -> Finding:
    return next(finding for finding in check_versions(versions, "13.0", device) if finding.name == name)


def test_versions_are_those_that_are_installed() -> None:
    versions = read_versions()
    assert versions.python == platform.python_version()
    assert versions.djinn == version("djinn-server")
    assert versions.packages["torch"] == Package(version("torch"), "<3,>=2.11")
    assert versions.packages["transformers"].installed == version("transformers")


def test_versions_that_fit_are_well_also_when_djinn_runs_from_source() -> None:
    findings = check_versions(GOOD, "13.0", "cuda:0")
    assert [(finding.name, finding.status, finding.summary) for finding in findings] == [
        ("python", Status.OK, "3.12.3, Djinn from source"),
        ("torch", Status.OK, "2.11.0+cu130, for CUDA 13.0"),
        ("triton", Status.OK, "3.6.0"),
        ("transformers", Status.OK, "5.17.0"),
    ]


@pytest.mark.parametrize(
    ("name", "package", "remedy"),
    [
        ("transformers", Package(None, "<6,>=5.17"), "pip install 'transformers<6,>=5.17'"),
        ("transformers", Package("4.57.0", "<6,>=5.17"), "pip install 'transformers<6,>=5.17'"),
        ("torch", Package("2.10.0+cu130", "<3,>=2.11"), "pip install 'torch<3,>=2.11'"),
        ("triton", Package("3.5.0", "==3.6.0"), "pip install 'triton==3.6.0'"),
        ("triton", Package(None, None), "pip install 'triton'"),
    ],
)
def test_a_package_that_is_missing_or_does_not_fit_comes_with_its_installation(
    name: str, package: Package, remedy: str
) -> None:
    finding = find(name, replace(GOOD, packages={**GOOD.packages, name: package}))
    assert finding.status is Status.ERROR
    assert finding.remedy == remedy
    without = replace(GOOD, packages={**GOOD.packages, "triton": Package(None, None)})
    assert find("triton", without, device="cpu").status is Status.OK, "a CPU needs none"
