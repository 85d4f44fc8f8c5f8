"""A machine in order, to spoil one thing of; and what there is to find in a report."""

from __future__ import annotations

from app.doctor.disk import Disk
from app.doctor.driver import Driver
from app.doctor.facts import DeviceFacts, Facts
from app.doctor.findings import Status
from app.doctor.link import Link
from app.doctor.memlock import Pinned
from app.doctor.numa import Numa
from app.doctor.report import Report
from app.doctor.versions import Package, Versions
from app.machine.memory import HostMemory
from tests.doctor.machines import CUDA_TORCH, GIB, H100, copies

OF_A_GPU = (
    "device",
    "driver",
    "compute_capability",
    "numa",
    "memlock",
    "pinned_memory",
    "pcie_link",
    "copy_to_device",
    "copy_from_device",
    "device_memory",
    "host_memory",
    "disk",
    "python",
    "torch",
    "triton",
    "transformers",
)
"""The names of all findings about a GPU, in the order of the report."""
OF_A_CPU = tuple(
    name for name in OF_A_GPU if name not in ("driver", "compute_capability", "pinned_memory", "pcie_link")
)


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


def names(report: Report) -> list[str]:
    """Of the findings, in their order."""
    return [finding.name for finding in report.findings]


def status_of(report: Report, name: str) -> Status:
    """Of the one finding with this name."""
    (finding,) = (finding for finding in report.findings if finding.name == name)
    return finding.status
