from __future__ import annotations

from dataclasses import replace

import pytest

from app.doctor.capability import check_capability
from app.doctor.findings import Finding, Status
from tests.doctor.machines import H100


def examine(capability: str, architectures: str) -> Finding:
    major, minor = map(int, capability.split("."))
    return check_capability(replace(H100, major=major, minor=minor), architectures.split())


@pytest.mark.parametrize(
    ("capability", "architectures"),
    [
        ("9.0", "sm_80 sm_90"),
        ("8.9", "sm_80 sm_90"),  # a later minor version
        ("9.0", "sm_90a"),
        ("12.0", "sm_90 compute_90"),  # compiled when it is loaded
        ("12.1", "sm_120"),
        ("10.3", "sm_100f"),
    ],
)
def test_a_gpu_that_pytorch_has_kernels_for_is_well(capability: str, architectures: str) -> None:
    finding = examine(capability, architectures)
    assert (finding.status, finding.summary) == (Status.OK, capability)


@pytest.mark.parametrize(
    ("capability", "architectures"),
    [
        ("12.0", "sm_80 sm_90"),
        ("8.0", "sm_86 sm_90"),  # an earlier minor version
        ("9.1", "sm_90a"),
        ("8.0", "compute_90"),
        ("12.0", "sm_100f"),
        ("9.0", "gfx942"),
    ],
)
def test_a_gpu_that_it_has_none_for_needs_another_pytorch(capability: str, architectures: str) -> None:
    finding = examine(capability, architectures)
    assert finding.status is Status.ERROR
    assert architectures.replace(" ", ", ") in finding.summary
    assert finding.remedy is not None
    assert "install a PyTorch" in finding.remedy


def test_a_gpu_without_bfloat16_is_to_be_served_in_float16() -> None:
    finding = examine("7.5", "sm_75")
    assert finding.status is Status.WARNING
    assert finding.remedy is not None
    assert "--dtype float16" in finding.remedy
