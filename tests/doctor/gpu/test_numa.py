from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from app.doctor.findings import Finding, Status
from app.doctor.numa import Numa, check_numa, read_numa
from tests.doctor.machines import ADDRESS, Kernel


def examine(kernel: Kernel, device: str = "cuda:0", *, numactl: bool = True) -> Finding:
    return check_numa(read_numa(kernel.root, None if device == "cpu" else ADDRESS), device, numactl=numactl)


def test_a_process_on_both_nodes_is_told_the_command_that_binds_it_to_the_gpus(kernel: Kernel) -> None:
    kernel.nodes("0-3,8-11", "4-7,12-15")
    kernel.process(cpus="0-15", memory="0-1")
    kernel.card(node=1)
    finding = examine(kernel)
    assert finding.status is Status.WARNING
    assert "GPU on node 1, process on nodes 0, 1 of nodes 0, 1" in finding.summary
    assert finding.remedy == "numactl --cpunodebind=1 --membind=1 djinn serve --device cuda:0"


def test_without_numactl_the_remedy_begins_with_its_installation(kernel: Kernel) -> None:
    kernel.nodes("0-3", "4-7")
    kernel.process(cpus="0-7", memory="0-1")
    kernel.card(node=0)
    remedy = examine(kernel, "cuda:2", numactl=False).remedy
    assert remedy == "install numactl, then: numactl --cpunodebind=0 --membind=0 djinn serve --device cuda:2"


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
    assert finding.remedy is not None
    assert "numactl --all --cpunodebind=1 --membind=1 " in finding.remedy
    assert "--cpuset-mems=1" in finding.remedy


def test_a_machine_that_does_not_tell_the_gpus_node_is_said_to(kernel: Kernel) -> None:
    kernel.nodes("0-3", "4-7")
    kernel.process(cpus="0-7", memory="0-1")
    kernel.card(node=-1)
    finding = examine(kernel)
    assert finding.status is Status.WARNING
    assert finding.remedy is not None
    assert "nvidia-smi topo -m" in finding.remedy
    assert "numactl --cpunodebind=N --membind=N" in finding.remedy


def test_a_gpu_that_the_kernel_does_not_list_is_of_unknown_place(kernel: Kernel) -> None:
    kernel.nodes("0-3", "4-7")
    kernel.process(cpus="0-7", memory="0-1")
    assert read_numa(kernel.root, ADDRESS).gpu_node is None


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


@pytest.mark.skipif(sys.platform != "linux", reason="sysfs")
def test_the_nodes_of_this_process_have_its_cpus() -> None:
    numa = read_numa(Path("/"), None)
    folders = [Path(f"/sys/devices/system/node/node{node}") for node in numa.process_nodes]
    cpus = {int(link.name.removeprefix("cpu")) for folder in folders for link in folder.glob("cpu[0-9]*")}
    assert os.sched_getaffinity(0) <= cpus or not numa.nodes
