"""Whole machines. Host memory, the memory lock and the versions are those of the machine that runs the tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.doctor.examination import examine, judge
from app.doctor.findings import Status
from app.doctor.report import Report
from app.gpu.doctor.probe import MachineProbe
from tests.doctor.machines import CPU_TORCH, CUDA_TORCH, GIB, H100, FakeProbe, Kernel, copies
from tests.doctor.reports import OF_A_CPU, OF_A_GPU, healthy_facts, names, status_of


@pytest.fixture
def machine(kernel: Kernel) -> Kernel:
    """A server with two nodes and an H100 on the second."""
    kernel.nodes("0-3", "4-7")
    kernel.process(cpus="0-7", memory="0-1")
    kernel.card(node=1)
    kernel.write("sys/module/nvidia/version", "580.159.04")
    return kernel


def examined(machine: Kernel, probe: FakeProbe, requested: str = "auto") -> Report:
    return examine(requested, machine.root / "state", probe, machine.root)


def test_a_gpu_machine_is_examined_from_driver_to_disk(machine: Kernel) -> None:
    healthy = judge("auto", "cuda:0", healthy_facts())
    assert [(each.name, each.status) for each in healthy] == [(name, Status.OK) for name in OF_A_GPU]
    report = examined(machine, FakeProbe())
    assert report.device == "cuda:0"
    assert names(report) == list(OF_A_GPU)
    assert status_of(report, "driver") is Status.OK
    assert status_of(report, "numa") is Status.WARNING
    assert report.facts.numa.gpu_node == 1
    assert report.facts.driver.release == "580.159.04"
    assert report.facts.device.gpu == H100
    assert report.facts.device.link is not None


def test_copies_that_are_faster_than_the_link_prove_it_wrong(machine: Kernel) -> None:
    machine.card(node=1, link="2.5 1")
    report = examined(machine, FakeProbe(measured=copies(55, 54)))
    assert report.facts.device.link is None
    assert status_of(report, "pcie_link") is Status.OK


def test_where_nothing_can_be_pinned_nothing_is_measured(machine: Kernel) -> None:
    report = examined(machine, FakeProbe(pin_says="CUDA error: out of memory"))
    assert status_of(report, "pinned_memory") is Status.ERROR
    assert not {"copies", "copy_to_device", "copy_from_device"} & set(names(report))


def test_a_full_gpu_is_not_filled_further(machine: Kernel) -> None:
    report = examined(machine, FakeProbe(card=replace(H100, free_bytes=64 << 20)))
    assert status_of(report, "device_memory") is Status.ERROR
    assert status_of(report, "copies") is Status.ERROR
    assert report.facts.device.copies_problem == "there is room for buffers of 8.0 MiB only"
    report = examined(machine, FakeProbe(copies_say="CUDA error: unspecified launch failure"))
    assert (status_of(report, "copies"), report.facts.device.copies) == (Status.ERROR, None)


def test_a_gpu_that_does_not_answer_leaves_the_rest_to_be_examined(machine: Kernel) -> None:
    report = examined(machine, FakeProbe(gpu_says="CUDA-capable device(s) is/are busy or unavailable"), "cuda")
    assert report.status is Status.ERROR
    assert "busy or unavailable" in report.findings[0].summary
    assert {"driver", "host_memory", "disk", "torch"} <= set(names(report))
    assert not {"compute_capability", "numa", "copies", "device_memory"} & set(names(report))


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error_with_the_drivers_state(kernel: Kernel) -> None:
    without = replace(CUDA_TORCH, gpu_count=0, problem="Found no NVIDIA driver on your system.")
    report = examined(kernel, FakeProbe(torch=without, driver=None), "cuda:1")
    assert report.device == "cuda:1"
    assert (status_of(report, "device"), status_of(report, "driver")) == (Status.ERROR, Status.ERROR)


def test_auto_on_a_machine_whose_gpu_cannot_be_used_examines_the_cpu_and_says_so(machine: Kernel) -> None:
    report = examined(machine, FakeProbe(torch=CPU_TORCH, driver=None))
    assert report.device == "cpu"
    assert (status_of(report, "device"), status_of(report, "driver")) == (Status.WARNING, Status.ERROR)
    assert "pinned_memory" not in names(report)


def test_this_machines_cpu_is_examined_for_real(tmp_path: Path) -> None:
    report = examine("cpu", tmp_path, MachineProbe())
    assert [name for name in names(report) if name != "driver"] == list(OF_A_CPU)  # an unused GPU has a driver
    measured = report.facts.device.copies
    assert measured is not None
    assert 0.1e9 < measured.to_device.slowest <= measured.to_device.median <= measured.to_device.fastest < 1e12
    assert report.facts.host.free_bytes > GIB // 100
