"""Whole machines: what is examined, and what `djinn doctor` and `djinn --version` print of it.

Host memory, the memory lock and the versions are those of the machine that runs the tests.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator

from app.cli import main
from app.doctor import host, probe
from app.doctor.examination import Report, examine, judge
from app.doctor.host import describe_installation
from app.doctor.probe import Status, TorchBuild
from app.settings import Settings
from tests.doctor.conftest import CPU_TORCH, CUDA_TORCH, H100, FakeProbe, Kernel, copies, healthy_facts
from tests.doctor.schema import schema_text
from tests.gpu.weights.bundles import make_model, overwrite

PUBLISHED = Path(__file__).parents[2] / "docs/doctor.schema.json"
OF_A_GPU = (
    *("device", "driver", "compute_capability", "numa", "memlock", "pinned_memory", "pcie_link"),
    *("copy_to_device", "copy_from_device", "device_memory", "host_memory", "disk"),
    *("python", "torch", "triton", "transformers"),
)
"""The names of all findings about a GPU, in the order of the report."""
NOT_OF_A_CPU = {"driver", "compute_capability", "pinned_memory", "pcie_link"}
OF_A_CPU = tuple(name for name in OF_A_GPU if name not in NOT_OF_A_CPU)


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


def statuses(report: Report) -> dict[str, Status]:
    """Of the findings by their names, in their order."""
    return {finding.name: finding.status for finding in report.findings}


def test_a_gpu_machine_is_examined_from_driver_to_disk(machine: Kernel) -> None:
    healthy = judge("auto", "cuda:0", healthy_facts())
    assert [(each.name, each.status) for each in healthy] == [(name, Status.OK) for name in OF_A_GPU]
    report = examined(machine, FakeProbe())
    found = statuses(report)
    assert (report.device, tuple(found)) == ("cuda:0", OF_A_GPU)
    assert (found["driver"], found["numa"]) == (Status.OK, Status.WARNING)
    assert (report.facts.numa.gpu_node, report.facts.driver.release) == (1, "580.159.04")
    assert (report.facts.device.gpu, report.facts.device.link is None) == (H100, False)


def test_copies_that_are_faster_than_the_link_prove_it_wrong(machine: Kernel) -> None:
    machine.card(node=1, link="2.5 1")
    report = examined(machine, FakeProbe(measured=copies(55, 54)))
    assert report.facts.device.link is None
    assert statuses(report)["pcie_link"] is Status.OK


def test_what_the_device_refuses_is_an_error_and_the_rest_is_examined(machine: Kernel) -> None:
    unpinned = statuses(examined(machine, FakeProbe(pin_says="CUDA error: out of memory")))
    assert unpinned["pinned_memory"] is Status.ERROR
    assert not {"copies", "copy_to_device", "copy_from_device"} & unpinned.keys()
    full = examined(machine, FakeProbe(card=replace(H100, free_bytes=64 << 20)))
    assert statuses(full)["device_memory"] is statuses(full)["copies"] is Status.ERROR
    assert full.facts.device.copies_problem == "there is room for buffers of 8.0 MiB only"
    failed = examined(machine, FakeProbe(copies_say="CUDA error: unspecified launch failure"))
    assert (statuses(failed)["copies"], failed.facts.device.copies) == (Status.ERROR, None)
    busy = examined(machine, FakeProbe(gpu_says="CUDA-capable device(s) is/are busy or unavailable"), "cuda")
    assert busy.status is Status.ERROR
    assert "busy or unavailable" in busy.findings[0].summary
    assert "TORCH_USE_CUDA_DSA" not in busy.to_json() + failed.to_json(), "the device's words are one line"
    assert {"driver", "host_memory", "disk", "torch"} <= statuses(busy).keys()
    assert not {"compute_capability", "numa", "copies", "device_memory"} & statuses(busy).keys()


def test_a_gpu_that_cannot_be_used_is_an_error_if_it_was_asked_for_and_else_a_warning(machine: Kernel) -> None:
    without = replace(CUDA_TORCH, gpu_count=0, problem="Found no NVIDIA driver on your system.")
    report = examined(machine, FakeProbe(torch=without, driver=None), "cuda:1")
    assert report.device == "cuda:1"
    assert statuses(report)["device"] is statuses(report)["driver"] is Status.ERROR
    report = examined(machine, FakeProbe(torch=CPU_TORCH, driver=None))
    assert report.device == "cpu"
    assert (statuses(report)["device"], statuses(report)["driver"]) == (Status.WARNING, Status.ERROR)
    assert "pinned_memory" not in statuses(report)


def test_copies_of_weights_are_read_wholly_if_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, folder = make_model(), tmp_path / "weights"
    asked = ("doctor", "--device", "cpu", "--json", "--weights", "--cache-dir", str(tmp_path))

    def found() -> list[tuple[str, str, str | None]]:
        main(asked)
        findings = json.loads(capsys.readouterr().out)["findings"]
        return [(each["status"], each["summary"], each["remedy"]) for each in findings if each["name"] == "weights"]

    [(status, summary, _)] = found()
    assert (status, summary) == ("ok", f"there are no copies of streamed weights in {folder}")
    for name in ("a", "b"):
        model.write(folder / f"{name}.safetensors").close()
    assert [status for status, *_ in found()] == ["ok", "ok"]
    damaged = folder / "b.safetensors"
    before, section = damaged.stat(), model.sections["bundle.1"]
    overwrite(damaged, section.offset + section.nbytes - 1)
    os.utime(damaged, ns=(before.st_atime_ns, before.st_mtime_ns))
    (folder / "c.safetensors").write_bytes(bytes(1000))
    [whole, flipped, foreign] = found()
    assert whole[0] == "ok"
    assert flipped[:2] == (
        "error",
        f"bundle.1 of the weights in {damaged} is lost: its checksum does not match its content",
    )
    assert foreign[0] == "error"
    assert f"{folder / 'c.safetensors'} cannot be used" in foreign[1]
    assert flipped[2] == foreign[2] == "Delete the file and start the server again: the server then writes it again"
    assert main(asked) == 1


def test_json_is_what_the_published_schema_says(kernel: Kernel) -> None:
    schema = json.loads(PUBLISHED.read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    assert PUBLISHED.read_text("utf-8") == schema_text()
    on_cpu = examine("cpu", None, FakeProbe(torch=CPU_TORCH, driver=None), kernel.root)
    facts = healthy_facts()
    for made in (Report.of("cuda:0", judge("auto", "cuda:0", facts), facts), on_cpu):
        Draft202012Validator(schema).validate(json.loads(made.to_json()))


def test_a_machine_in_order_ends_with_0_and_prints_a_line_for_each_finding_or_json_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--device", "cpu", "--state-dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(name.replace("_", " ") in out for name in OF_A_CPU)
    assert str(tmp_path) in out
    assert main(["doctor", "--device", "cpu", "--state-dir", "none", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["device"], report["facts"]["disk"], err) == ("cpu", None, "")


def test_an_error_ends_with_1_and_says_what_to_do_and_what_is_no_device_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for device in ("abacus", "cuda:-1", "CPU", ""):
        assert main(["doctor", "--device", device]) == 2
        assert "auto, cpu, cuda or cuda:N" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["doctor", "--device", "cuda", "--state-dir", "none"]) == 1
        out, _ = capsys.readouterr()
        assert out.startswith("error    device              PyTorch cannot use cuda:0: ")
        assert "\n         -> install a PyTorch with CUDA" in out


def test_the_version_is_told_with_what_would_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    build = TorchBuild("2.13.0+cu130", "13.0", ("sm_90",), 2, None)
    monkeypatch.setattr(host, "newest_cuda", lambda: "13.0")
    monkeypatch.setattr(probe.MachineProbe, "build", lambda self: build)
    for settings, device, dtype in (
        (Settings(), "cuda:0", "bfloat16"),
        (Settings(device="cpu"), "cpu", "float32"),
        (Settings(device="cuda:1", dtype="float16"), "cuda:1", "float16"),
    ):
        facts = dict(line.split(" ", 1) for line in describe_installation(settings).splitlines())
        assert (facts["device"], facts["dtype"]) == (device, dtype)


WITHOUT_TORCH = """
import sys
from app.doctor import host
from app.settings import Settings
host.newest_cuda = lambda: None
print(host.describe_installation(Settings()))
sys.exit("torch" in sys.modules)
"""


def test_a_machine_without_a_driver_loads_no_pytorch_for_the_answer() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "device cpu\ndtype float32\n" in done.stdout
