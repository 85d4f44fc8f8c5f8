"""The GPU check: its stages on a CPU, what they make of what they see, and what is carried to a GPU machine."""

import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import psutil
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu_check.journal import Journal, Outcome, StageContext, StageRecord, read_journal
from benchmarks.gpu_check.overlay import ROOT
from benchmarks.gpu_check.plan import FULL, TINY
from benchmarks.gpu_check.record import Run, describe_run, read_run
from benchmarks.gpu_check.running import STAGES, Budget, run_check, run_for, run_stage, run_stages, write_page_of
from benchmarks.gpu_check.stages import machine
from loadgen.report.tables import Figure
from tests.release.test_setup import PYTEST, WITHOUT

ENGINE_STAGES = [stage.name for stage in STAGES if stage.name not in ("vllm", "cuda_tests")]


def check(folder: Path, *stages: str) -> Run:
    """A run of these stages, read back from its file."""
    options = Namespace(tiny=True, cpu=False, only=list(stages), profile=[], output=folder, time_limit=280.0)
    assert run_check(options)
    (data,) = folder.glob("gpu-check-*.json")
    return read_run(data)


def read(path: Path) -> StageRecord:
    record = StageRecord("swap", "Swap")
    read_journal(path, record)
    return record


def median_of(figure: Figure) -> float:
    assert figure.spread is not None
    return figure.spread.median


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_stage_runs_on_a_cpu(tmp_path: Path) -> None:
    run = check(tmp_path, *ENGINE_STAGES)
    found = {record.name: record for record in run.stages}
    ends = {name: (record.outcome, record.reason) for name, record in found.items()}
    assert ends == dict.fromkeys(ENGINE_STAGES, (Outcome.DONE, ""))
    assert all(record.figures or record.name == "doctor" for record in run.stages)
    assert found["doctor"].facts
    medians = {each.name: median_of(each) for name in ("sessions", "density") for each in found[name].figures}
    for label, median in (
        ("Sessions that ended / begun", 1),
        ("Tokens recomputed", 0),
        ("Turns that completed / planned", 1),
        ("Errors", 0),
    ):
        assert medians[label] == median
    assert len(found["decode"].samples) == 4, "Djinn and Transformers, at two batches"
    assert {point.series for point in found["weights"].points} == {"Djinn", "Accelerate"}
    assert {point.series for point in found["resume"].points} == {"recomputed", "hand-written offload", "Djinn"}
    (page,), (text,) = tmp_path.glob("gpu-check-*.html"), tmp_path.glob("gpu-check-*.md")
    assert page.read_text().count("<svg") == 4
    assert all(record.title in text.read_text() for record in run.stages)


def test_the_record_says_what_was_run_and_a_page_can_be_drawn_later(tmp_path: Path) -> None:
    run = check(tmp_path, "copies")
    assert run.device.name
    assert (run.plan["name"], bool(run.versions["torch"])) == ("tiny", True)
    (data,), (page,) = tmp_path.glob("gpu-check-*.json"), tmp_path.glob("gpu-check-*.html")
    before = page.read_text()
    page.unlink()
    assert write_page_of(data) == 0
    assert page.read_text() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_where_there_is_no_gpu_nothing_is_tried(tmp_path: Path) -> None:
    options = Namespace(tiny=False, cpu=False, only=[], profile=[], output=tmp_path / "results", time_limit=280.0)
    with pytest.raises(SystemExit, match="no CUDA device"):
        run_check(options)
    assert not options.output.exists()


def test_a_stage_is_killed_when_its_time_is_over_and_not_begun_without_time(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    files = ["--journal", str(tmp_path / "journal"), "--output", str(tmp_path)]
    run, kept = describe_run("cuda", asdict(FULL), []), list[StageRecord]()
    with tempfile.TemporaryFile("w+") as log:
        assert run_for(["copies", "--plan", "tiny", "--budget", "60", *files], log, 0.1) is None
        run_stages(STAGES, FULL, run, Budget(5), (tmp_path, log), kept.append)
    assert {child.pid for child in psutil.Process().children()} <= before
    assert [record.outcome for record in kept] == [Outcome.OUT_OF_TIME] * len(STAGES)
    assert not run.is_well


TESTS = """
import pytest
pytestmark = pytest.{mark}
def test_right(): pass
def test_wrong(): assert 1 == 2
def test_elsewhere(): pytest.skip("no")
"""


@pytest.mark.long
def test_each_end_of_a_cuda_test_is_counted_and_failures_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda: needs one\n")
    (tmp_path / "test_some.py").write_text(TESTS.format(mark=machine.MARK))
    with (tmp_path / "journal").open("w") as file:
        context = StageContext(FULL, Journal(file, has_targets=True), time.monotonic() + 60, tmp_path)
        machine.report(context, machine.run_tests(["test_some.py"], tmp_path, 60))
    record = read(tmp_path / "journal")
    assert [median_of(figure) for figure in record.figures] == [1, 1, 1]
    assert record.notes == ["Failed: test_some::test_wrong"]
    assert not record.is_well


# What a GPU machine must have, and what is carried to it.

WHEELS = ROOT / "benchmarks" / "gpu_check" / "wheels.txt"
THERE = ("torch", "triton", "transformers", "accelerate")
"""Packages that a bare GPU machine has, with all that they require."""


def left_at_home() -> set[str]:
    """Modules that are installed here, but neither on a bare GPU machine nor in the wheels that go to it."""
    lines = WHEELS.read_text("utf-8").splitlines()
    there = {canonicalize_name(line) for line in lines if not line.startswith("#")}
    waiting = [*THERE]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in there:
            there.add(name)
            with suppress(PackageNotFoundError):  # required for another platform only
                needs = [Requirement(each) for each in requires(name) or ()]
                waiting += [need.name for need in needs if "extra" not in str(need.marker)]
    return {
        module
        for module, packages in packages_distributions().items()
        if not there & {canonicalize_name(package) for package in packages} and "djinn-server" not in packages
    }


BARE = WITHOUT.replace("{left_out}", repr(left_at_home()))
MODULES = [*(stage.module for stage in STAGES), "app.main", "app.web.server", "benchmarks.gpu_check.running"]
PLUGINS = ("--disable-plugin-autoload", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout")
"""Those that travel."""


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_server_stages_and_cuda_tests_need_no_package_that_only_a_cpu_needs() -> None:
    files = machine.find_files()
    assert files
    imports = f"import importlib\nfor name in {MODULES}: importlib.import_module(name)\n"
    run_python(BARE + imports + PYTEST, "--collect-only", *machine.OPTIONS, *PLUGINS, *files)


def test_what_a_stage_lacks_is_said_by_name(tmp_path: Path) -> None:
    stage = replace(STAGES[0], needs=("torch", "no_such_package"))
    run_stage(stage, TINY, tmp_path / "journal", tmp_path, 10)
    assert read(tmp_path / "journal").reason == "not installed: no_such_package"
