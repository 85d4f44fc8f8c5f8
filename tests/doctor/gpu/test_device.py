from __future__ import annotations

from dataclasses import replace

import pytest

from app.doctor.device import check_cpu, check_gpu, choose_device, cpu_name, nvidia_cards
from app.doctor.findings import Status
from app.domain.errors import FieldOutOfRange
from app.gpu.doctor.facts import TorchBuild
from tests.doctor.machines import CPU_TORCH, CUDA_TORCH, H100, Kernel

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
    assert no_driver.remedy is not None
    assert "--gpus all" in no_driver.remedy


def test_a_gpu_that_is_there_has_its_name() -> None:
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
    assert finding.remedy is not None
    assert remedy in finding.remedy
