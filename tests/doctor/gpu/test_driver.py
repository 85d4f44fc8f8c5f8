from __future__ import annotations

import pytest

from app.doctor.driver import Driver, check_driver, read_release
from app.doctor.findings import Status
from tests.doctor.machines import Kernel


def test_the_release_is_the_kernel_modules(kernel: Kernel) -> None:
    assert read_release(kernel.root) is None
    kernel.write("sys/module/nvidia/version", "580.159.04")
    assert read_release(kernel.root) == "580.159.04"


@pytest.mark.parametrize("torch_cuda", ["12.6", "13.0", "13.2", None])
def test_a_driver_runs_every_minor_version_of_its_major_one_and_older_ones(torch_cuda: str | None) -> None:
    finding = check_driver(Driver("580.159.04", "13.0"), torch_cuda)
    assert (finding.status, finding.summary) == (Status.OK, "580.159.04, for CUDA 13.0")


def test_a_driver_of_an_older_major_version_is_to_be_updated() -> None:
    finding = check_driver(Driver(None, "12.8"), "13.0")
    assert finding.status is Status.ERROR
    assert "of unknown release, for CUDA 12.8; PyTorch needs one for CUDA 13.0" in finding.summary
    assert finding.remedy == "update the driver, or install a PyTorch for CUDA 12"


def test_without_a_driver_there_is_one_to_install() -> None:
    finding = check_driver(Driver(None, None), "13.0")
    assert finding.status is Status.ERROR
    assert finding.remedy is not None
    assert "install the NVIDIA driver" in finding.remedy
