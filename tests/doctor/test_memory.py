from __future__ import annotations

from dataclasses import replace

import psutil
import pytest

from app.doctor.findings import Status
from app.doctor.memory import check_device_memory, check_host_memory
from app.machine.cgroup import MemoryLimit, read_memory_limit
from app.machine.memory import HostMemory, read_host_memory
from tests.doctor.machines import GIB, H100, Kernel


def test_a_gpu_that_nobody_else_uses_is_well() -> None:
    finding = check_device_memory(H100)
    assert (finding.status, finding.summary) == (Status.OK, "79.0 GiB free of 80.0 GiB")
    assert check_device_memory(None).status is Status.OK


@pytest.mark.parametrize(("free", "status"), [(40 * GIB, Status.WARNING), (GIB // 2, Status.ERROR)])
def test_a_gpu_that_others_fill_is_to_be_freed(free: int, status: Status) -> None:
    finding = check_device_memory(replace(H100, free_bytes=free))
    assert finding.status is status
    assert finding.remedy is not None
    assert "nvidia-smi" in finding.remedy


def test_the_memory_is_this_machines(kernel: Kernel) -> None:
    memory = read_host_memory(kernel.root)
    assert memory.total_bytes == psutil.virtual_memory().total
    assert memory.limit is None
    assert 0 < memory.free_bytes == memory.available_bytes < memory.total_bytes


def test_a_full_machine_is_an_error() -> None:
    finding = check_host_memory(HostMemory(64 * GIB, GIB // 2, None))
    assert finding.status is Status.ERROR
    assert finding.remedy is not None
    assert "stop other processes" in finding.remedy


def test_a_container_that_may_use_less_than_is_free_is_a_warning() -> None:
    finding = check_host_memory(HostMemory(64 * GIB, 60 * GIB, MemoryLimit(16 * GIB, 12 * GIB)))
    assert finding.status is Status.WARNING
    assert "12.0 GiB free of 64.0 GiB" in finding.summary
    assert finding.remedy is not None
    assert "--kv-host" in finding.remedy
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
