from __future__ import annotations

import subprocess
import sys

import pytest

from app.doctor import installation
from app.doctor.installation import describe_installation
from app.gpu.doctor import probe
from app.gpu.doctor.facts import TorchBuild
from app.settings import Settings

WITHOUT_TORCH = """
import sys
from app.doctor import installation
from app.settings import Settings
installation.newest_cuda = lambda: None
print(installation.describe_installation(Settings()))
sys.exit("torch" in sys.modules)
"""


def facts(**settings: str) -> dict[str, str]:
    lines = describe_installation(Settings(**settings)).splitlines()  # type: ignore[arg-type]
    return dict(line.split(" ", 1) for line in lines)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    build = TorchBuild("2.13.0+cu130", "13.0", ("sm_90",), 2, None)
    monkeypatch.setattr(installation, "newest_cuda", lambda: "13.0")
    monkeypatch.setattr(probe.MachineProbe, "build", lambda self: build)


@pytest.mark.usefixtures("two_gpus")
def test_auto_takes_the_first_gpu_and_half_precision() -> None:
    assert (facts()["device"], facts()["dtype"]) == ("cuda:0", "bfloat16")


@pytest.mark.usefixtures("two_gpus")
def test_what_is_set_is_told_instead() -> None:
    assert (facts(device="cpu")["device"], facts(device="cpu")["dtype"]) == ("cpu", "float32")
    assert facts(device="cuda:1", dtype="float16")["device"] == "cuda:1"
    assert facts(device="cuda:1", dtype="float16")["dtype"] == "float16"


def test_a_machine_without_a_driver_loads_no_pytorch_for_the_answer() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "device cpu\ndtype float32\n" in done.stdout
