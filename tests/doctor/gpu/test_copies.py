from __future__ import annotations

from dataclasses import replace

from app.doctor.copies import BUFFER_BYTES, buffer_bytes, check_copies
from app.doctor.findings import Status
from app.doctor.link import Link
from tests.doctor.machines import GIB, copies, rates

LINK = Link(32.0, 16, 32.0, 16)


def test_copies_near_the_link_are_well_in_both_directions() -> None:
    to_device, from_device = check_copies(copies(55, 54), None, LINK)
    assert (to_device.name, to_device.status) == ("copy_to_device", Status.OK)
    assert to_device.summary == "55.0 GB/s, 87% of the PCIe link"
    assert (from_device.name, from_device.status) == ("copy_from_device", Status.OK)


def test_the_direction_that_is_far_below_the_link_is_a_warning() -> None:
    to_device, from_device = check_copies(copies(55, 20), None, LINK)
    assert to_device.status is Status.OK
    assert from_device.status is Status.WARNING
    assert "32% of the PCIe link" in from_device.summary
    assert from_device.remedy is not None
    assert "NUMA" in from_device.remedy


def test_without_a_link_to_hold_them_against_they_are_only_told() -> None:
    assert [(finding.status, finding.summary) for finding in check_copies(copies(12, 11), None, None)] == [
        (Status.OK, "12.0 GB/s"),
        (Status.OK, "11.0 GB/s"),
    ]


def test_unsteady_copies_say_that_the_machine_is_not_quiet() -> None:
    unsteady = replace(copies(), to_device=rates(55, slowest=0.4))
    finding, _ = check_copies(unsteady, None, LINK)
    assert finding.status is Status.WARNING
    assert "from 22.0 GB/s to 55.5 GB/s" in finding.summary
    assert finding.remedy is not None
    assert "stop what else runs" in finding.remedy


def test_copies_that_failed_are_an_error_in_the_devices_words() -> None:
    (finding,) = check_copies(None, "CUDA error: uncorrectable ECC error encountered", LINK)
    assert finding.status is Status.ERROR
    assert "uncorrectable ECC error" in finding.summary
    assert finding.remedy is not None
    assert "nvidia-smi -q" in finding.remedy


def test_buffers_leave_most_of_the_memory_alone() -> None:
    assert buffer_bytes(64 * GIB, 80 * GIB) == BUFFER_BYTES
    assert buffer_bytes(GIB, 80 * GIB) == GIB // 8
    assert buffer_bytes(64 * GIB, 0) == 0
