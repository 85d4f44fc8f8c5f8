from __future__ import annotations

import subprocess
import sys

import pytest

from app.doctor.findings import Status
from app.doctor.memlock import Pinned, check_memlock, check_pinned
from tests.doctor.machines import GIB

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
    assert finding.remedy is not None
    assert "ulimit -l unlimited" in finding.remedy


def test_memory_that_cannot_be_pinned_is_an_error_in_the_devices_words() -> None:
    finding = check_pinned(Pinned(256 * MIB, "CUDA error: out of memory"))
    assert finding.status is Status.ERROR
    assert "CUDA error: out of memory" in finding.summary
    assert finding.remedy is not None
    assert "ulimit -l unlimited" in finding.remedy
    assert check_pinned(Pinned(256 * MIB, None)).status is Status.OK
