"""A GPU: which device is served on, its driver, its kernels, its link, its NUMA node, and copies to it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.doctor.capability import check_capability
from app.doctor.copies import BUFFER_BYTES, buffer_bytes, check_copies
from app.doctor.device import check_cpu, check_gpu, choose_device, cpu_name, nvidia_cards
from app.doctor.driver import Driver, check_driver, read_release
from app.doctor.findings import Finding, Status
from app.doctor.link import Link, check_link, read_link
from app.doctor.numa import Numa, check_numa, read_numa
from app.domain.errors import FieldOutOfRange
from app.gpu.doctor.facts import TorchBuild
from tests.doctor.machines import ADDRESS, CPU_TORCH, CUDA_TORCH, GIB, H100, Kernel, copies, rates

NO_DRIVER = replace(CUDA_TORCH, gpu_count=0, problem="Found no NVIDIA driver on your system.")


@pytest.mark.parametrize(
    ("requested", "gpus", "device"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 2, "cpu"),
        ("cuda", 2, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
        ("cuda", 0, "cuda:0"),  # asked for, so it is to be found out why it is not there
        ("cuda:7", 1, "cuda:7"),
    ],
)
def test_the_device_is_the_one_that_was_asked_for(requested: str, gpus: int, device: str) -> None:
    assert choose_device(requested, gpus) == device


@pytest.mark.parametrize("requested", ["abacus", "cuda:", "cuda:-1", "cuda:x", "CPU", "mps", ""])
def test_another_word_is_refused_with_those_that_are_known(requested: str) -> None:
    with pytest.raises(FieldOutOfRange, match="auto, cpu, cuda or cuda:N") as caught:
        choose_device(requested, 1)
    assert caught.value.param == "device"


def test_nvidia_cards_are_counted_but_not_their_sound_or_others_graphics(kernel: Kernel) -> None:
    assert nvidia_cards(kernel.root) == 0
    kernel.card("0000:41:00.0")
    kernel.card("0000:42:00.0")
    kernel.card("0000:42:00.1")
    kernel.write("sys/bus/pci/devices/0000:42:00.1/class", "0x040300")
    kernel.card("0000:00:02.0")
    kernel.write("sys/bus/pci/devices/0000:00:02.0/vendor", "0x8086")
    assert nvidia_cards(kernel.root) == 2


def test_a_processor_has_its_name(kernel: Kernel) -> None:
    kernel.write("proc/cpuinfo", "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9654\n")
    assert cpu_name(kernel.root).startswith("AMD EPYC 9654 (")


def test_a_cpu_that_was_meant_is_well() -> None:
    assert check_cpu("cpu", "AMD EPYC", CPU_TORCH, cards=1).status is Status.OK
    assert check_cpu("auto", "AMD EPYC", CPU_TORCH, cards=0).status is Status.OK


def test_a_gpu_that_auto_does_not_find_is_a_warning_with_the_way_to_use_it() -> None:
    no_cuda = check_cpu("auto", "AMD EPYC", CPU_TORCH, cards=1)
    assert (no_cuda.status, no_cuda.remedy and "PyTorch with CUDA" in no_cuda.remedy) == (Status.WARNING, True)
    no_driver = check_cpu("auto", "AMD EPYC", NO_DRIVER, cards=1)
    assert "Found no NVIDIA driver" in no_driver.summary
    assert "--gpus all" in (no_driver.remedy or "")


def test_a_gpu_that_is_there_is_well() -> None:
    finding = check_gpu("cuda:0", CUDA_TORCH, H100, None)
    assert (finding.status, finding.summary) == (Status.OK, "cuda:0: NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("build", "problem", "says", "remedy"),
    [
        (CPU_TORCH, None, "without CUDA", "PyTorch with CUDA"),
        (NO_DRIVER, None, "Found no NVIDIA driver", "CUDA_VISIBLE_DEVICES"),
        (replace(CUDA_TORCH, gpu_count=2), None, "cuda:5 is not here: cuda:0, cuda:1", "CUDA_VISIBLE_DEVICES"),
        (replace(CUDA_TORCH, gpu_count=8), "CUDA error: busy", "CUDA error: busy", "nvidia-smi"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_an_error_with_its_cause(
    build: TorchBuild, problem: str | None, says: str, remedy: str
) -> None:
    finding = check_gpu("cuda:5", build, None, problem)
    assert finding.status is Status.ERROR
    assert says in finding.summary
    assert remedy in (finding.remedy or "")


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
    assert "install the NVIDIA driver" in (finding.remedy or "")


def compiled_for(capability: str, architectures: str) -> Finding:
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
    finding = compiled_for(capability, architectures)
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
    finding = compiled_for(capability, architectures)
    assert finding.status is Status.ERROR
    assert architectures.replace(" ", ", ") in finding.summary
    assert "install a PyTorch" in (finding.remedy or "")


def test_a_gpu_without_bfloat16_is_to_be_served_in_float16() -> None:
    finding = compiled_for("7.5", "sm_75")
    assert finding.status is Status.WARNING
    assert "--dtype float16" in (finding.remedy or "")


@pytest.mark.parametrize(("speed", "gigabytes"), [(2.5, 4.0), (5.0, 8.0), (8.0, 15.75), (16.0, 31.5), (32.0, 63.0)])
def test_sixteen_lanes_carry_what_the_standard_says(speed: float, gigabytes: float) -> None:
    assert Link(speed, 16, speed, 16).bytes_per_second / 1e9 == pytest.approx(gigabytes, rel=1e-3)


def test_a_link_that_runs_as_its_card_can_is_well(kernel: Kernel) -> None:
    kernel.card()
    finding = check_link(read_link(kernel.root, ADDRESS))
    assert (finding.status, finding.summary) == (Status.OK, "32 GT/s x16, 63.0 GB/s each way")


@pytest.mark.parametrize("link", ["32.0 8", "16.0 16", "2.5 1"])
def test_a_link_below_what_its_card_can_is_a_warning(kernel: Kernel, link: str) -> None:
    kernel.card(link=link)
    finding = check_link(read_link(kernel.root, ADDRESS))
    assert finding.status is Status.WARNING
    assert "the card can do 32 GT/s x16" in finding.summary
    assert "slot" in (finding.remedy or "")


@pytest.mark.parametrize("link", ["Unknown 16", "32.0 0"])
def test_a_virtual_machine_need_not_tell(kernel: Kernel, link: str) -> None:
    kernel.card(link=link)
    assert read_link(kernel.root, ADDRESS) is None
    assert read_link(kernel.root, "0000:99:00.0") is None
    assert check_link(None).status is Status.OK


def examine(kernel: Kernel, device: str = "cuda:0", *, numactl: bool = True) -> Finding:
    return check_numa(read_numa(kernel.root, None if device == "cpu" else ADDRESS), device, numactl=numactl)


def test_a_process_on_both_nodes_is_told_the_command_that_binds_it_to_the_gpus(kernel: Kernel) -> None:
    kernel.nodes("0-3,8-11", "4-7,12-15")
    kernel.process(cpus="0-15", memory="0-1")
    kernel.card(node=1)
    finding = examine(kernel)
    assert finding.status is Status.WARNING
    assert "GPU on node 1, process on nodes 0, 1 of nodes 0, 1" in finding.summary
    command = "numactl --cpunodebind=1 --membind=1 djinn serve --device cuda:0"
    assert finding.remedy == command
    assert examine(kernel, numactl=False).remedy == f"install numactl, then: {command}"


def test_a_process_on_the_gpus_node_is_well(kernel: Kernel) -> None:
    kernel.nodes("0-3", "4-7")
    kernel.process(cpus="4-6", memory="0-1")
    kernel.card(node=1)
    assert examine(kernel).status is Status.OK


@pytest.mark.parametrize(("cpus", "memory"), [("0-3", "0-1"), ("0-7", "0")])
def test_a_process_that_is_kept_off_the_gpus_node_must_be_let_there(kernel: Kernel, cpus: str, memory: str) -> None:
    kernel.nodes("0-3", "4-7")
    kernel.process(cpus, memory)
    kernel.card(node=1)
    finding = examine(kernel)
    assert finding.status is Status.WARNING
    assert "numactl --all --cpunodebind=1 --membind=1 " in (finding.remedy or "")
    assert "--cpuset-mems=1" in (finding.remedy or "")


def test_a_machine_that_does_not_tell_the_gpus_node_is_said_to(kernel: Kernel) -> None:
    kernel.nodes("0-3", "4-7")
    kernel.process(cpus="0-7", memory="0-1")
    kernel.card(node=-1)
    finding = examine(kernel)
    assert finding.status is Status.WARNING
    assert "nvidia-smi topo -m" in (finding.remedy or "")
    assert "numactl --cpunodebind=N --membind=N" in (finding.remedy or "")


def test_a_cpu_server_on_several_nodes_is_told_to_stay_on_one(kernel: Kernel) -> None:
    kernel.nodes("0-3", "4-7")
    kernel.process(cpus="2-7", memory="0-1")
    finding = examine(kernel, "cpu")
    assert finding.status is Status.WARNING
    assert finding.remedy == "numactl --cpunodebind=0 --membind=0 djinn serve --device cpu"
    kernel.process(cpus="4-7", memory="0-1")
    assert examine(kernel, "cpu").status is Status.OK


@pytest.mark.parametrize("cpus", [(), ("0-7",), ("0-7", "")])
def test_with_one_node_there_is_nothing_to_bind(kernel: Kernel, cpus: tuple[str, ...]) -> None:
    """Memory without CPUs, as of CXL, is a node too, but none that a process can be on."""
    kernel.nodes(*cpus)
    kernel.process(cpus="0-7", memory="0")
    kernel.card(node=-1)
    assert examine(kernel).status is Status.OK


def test_a_sandbox_that_hides_what_the_process_may_use_lets_it_use_all(kernel: Kernel) -> None:
    kernel.nodes("0-3", "4-7")
    kernel.write("proc/self/status", "Name:\tpython")
    assert read_numa(kernel.root, None) == Numa((0, 1), None, (0, 1), (0, 1))
    assert read_numa(kernel.root, ADDRESS).gpu_node is None, "the kernel does not list it"


@pytest.mark.skipif(sys.platform != "linux", reason="sysfs")
def test_the_nodes_of_this_process_have_its_cpus() -> None:
    numa = read_numa(Path("/"), None)
    folders = [Path(f"/sys/devices/system/node/node{node}") for node in numa.process_nodes]
    cpus = {int(link.name.removeprefix("cpu")) for folder in folders for link in folder.glob("cpu[0-9]*")}
    assert os.sched_getaffinity(0) <= cpus or not numa.nodes


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
    assert "NUMA" in (from_device.remedy or "")


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
    assert "stop what else runs" in (finding.remedy or "")


def test_copies_that_failed_are_an_error_in_the_devices_words() -> None:
    (finding,) = check_copies(None, "CUDA error: uncorrectable ECC error encountered", LINK)
    assert finding.status is Status.ERROR
    assert "uncorrectable ECC error" in finding.summary
    assert "nvidia-smi -q" in (finding.remedy or "")


def test_buffers_leave_most_of_the_memory_alone() -> None:
    assert buffer_bytes(64 * GIB, 80 * GIB) == BUFFER_BYTES
    assert (buffer_bytes(GIB, 80 * GIB), buffer_bytes(64 * GIB, 0)) == (GIB // 8, 0)
