"""The probe of this machine, and of machines that PyTorch is made to speak of."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.doctor.probe import MachineProbe, ProbeFailed, newest_cuda

MIB = 1 << 20


def driver(version: int, *, fails: int = 0) -> Callable[[str], Any]:
    """A loader of a driver library that answers like NVIDIA's."""

    def answer(pointer: Any) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = version
        return fails

    return lambda name: SimpleNamespace(cuDriverGetVersion=answer)


@pytest.mark.parametrize(("number", "version"), [(13000, "13.0"), (12080, "12.8"), (12010, "12.1")])
def test_the_driver_tells_the_newest_cuda_that_it_can_run(number: int, version: str) -> None:
    assert newest_cuda(driver(number)) == version


def test_a_driver_that_is_missing_or_fails_has_no_version() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert newest_cuda(missing) is None
    assert newest_cuda(driver(0, fails=100)) is None


def test_a_gpu_is_described_in_cudas_words_and_why_there_is_none_in_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    build = MachineProbe().build()
    assert (build.gpu_count, build.problem) == (0, "Found no NVIDIA driver on your system.")
    properties = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=0x1F
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70, 80))
    gpu = MachineProbe().gpu(3)
    assert (gpu.index, gpu.name, gpu.major, gpu.minor) == (3, "NVIDIA H100", 9, 0)
    assert (gpu.free_bytes, gpu.total_bytes) == (70, 80)
    assert gpu.pci_address == "0001:c1:1f.0"


def test_a_device_that_refuses_is_a_failure_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    monkeypatch.setattr(torch, "empty", refuse)
    probe = MachineProbe()
    for question in (lambda: probe.gpu(0), lambda: probe.pin(0, MIB), lambda: probe.gpu_copies(0, MIB)):
        with pytest.raises(ProbeFailed, match=r"^CUDA error: out of memory$"):
            question()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_what_pytorch_says_and_copies_faster_than_a_network_would() -> None:
    probe = MachineProbe()
    gpu, newest = probe.gpu(0), probe.driver_cuda()
    assert gpu.name == torch.cuda.get_device_name(0)
    assert (gpu.major, gpu.minor) == torch.cuda.get_device_capability(0)
    assert 0 < gpu.free_bytes <= gpu.total_bytes
    assert newest is not None
    assert torch.version.cuda is not None
    assert int(newest.split(".")[0]) >= int(torch.version.cuda.split(".")[0])
    probe.pin(0, 64 * MIB)
    copies = probe.gpu_copies(0, 64 * MIB)
    for rates in (copies.to_device, copies.from_device):
        assert 1e9 < rates.slowest <= rates.median <= rates.fastest < 1e12
