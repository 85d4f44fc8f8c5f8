"""The stages of the GPU check on a CPU, and what they make of what they see."""

import io
import tempfile
import time
from argparse import Namespace
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import psutil
import pytest

from benchmarks.figures import Target
from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.plan import FULL
from benchmarks.gpu_check.processes import run_for
from benchmarks.gpu_check.program import run_check, write_page_of
from benchmarks.gpu_check.reports.journal import Journal, Outcome, StageRecord, read_journal
from benchmarks.gpu_check.reports.record import Run, describe_run, read_run
from benchmarks.gpu_check.runner import Budget, run_stages
from benchmarks.gpu_check.stage_list import STAGES
from benchmarks.gpu_check.stages import cuda_tests

ENGINE_STAGES = [stage.name for stage in STAGES if stage.name != "cuda_tests"]


def check(folder: Path, *stages: str) -> Run:
    """A run of these stages, read back from its file."""
    options = Namespace(tiny=True, only=list(stages), profile=[], output=folder, time_limit=280.0)
    assert run_check(options)
    (data,) = folder.glob("gpu-check-*.json")
    return read_run(data)


def median_of(record: StageRecord, label: str) -> float:
    (figure,) = [figure for figure in record.figures if figure.label == label]
    return figure.spread.median


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_stage_runs_on_a_cpu(tmp_path: Path) -> None:
    run = check(tmp_path, *ENGINE_STAGES)

    found = {record.name: record for record in run.stages}
    assert {name: (record.outcome, record.reason) for name, record in found.items()} == dict.fromkeys(
        ENGINE_STAGES, (Outcome.DONE, "")
    )
    assert all(record.figures or record.name == "doctor" for record in run.stages)
    assert found["doctor"].facts
    assert median_of(found["sessions"], "Sessions that ended / begun") == 1
    assert median_of(found["sessions"], "Tokens recomputed") == 0
    assert median_of(found["density"], "Turns that completed / planned") == 1
    assert median_of(found["density"], "Errors") == 0
    assert len(found["decode"].samples) == 4, "Djinn and Transformers, at two batches"
    assert {point.series for point in found["weights"].points} == {"Djinn", "Accelerate"}
    assert {point.series for point in found["resume"].points} == {"recomputed", "hand-written offload", "Djinn"}

    (page,) = tmp_path.glob("gpu-check-*.html")
    assert page.read_text().count("<svg") == 4
    (text,) = tmp_path.glob("gpu-check-*.md")
    assert all(record.title in text.read_text() for record in run.stages)


def test_the_record_says_what_was_run_and_a_page_can_be_drawn_later(tmp_path: Path) -> None:
    run = check(tmp_path, "copies")
    assert run.device.name
    assert run.versions["torch"]
    assert run.plan["name"] == "tiny"
    (data,), (page,) = tmp_path.glob("gpu-check-*.json"), tmp_path.glob("gpu-check-*.html")
    before = page.read_text()
    page.unlink()
    assert write_page_of(data) == 0
    assert page.read_text() == before


def test_where_there_is_no_gpu_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = Namespace(tiny=False, only=[], profile=[], output=tmp_path / "results", time_limit=280.0)
    with pytest.raises(SystemExit, match="no CUDA device"):
        run_check(options)
    assert not options.output.exists()


def test_a_stage_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    files = ["--journal", str(tmp_path / "journal"), "--output", str(tmp_path)]
    with tempfile.TemporaryFile("w+") as log:
        assert run_for(["copies", "--plan", "tiny", "--budget", "60", *files], log, 0.1) is None
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_stage_without_a_gpu_or_without_time_is_not_begun(tmp_path: Path) -> None:
    run, kept = describe_run("cuda", asdict(FULL), []), list[StageRecord]()
    with tempfile.TemporaryFile("w+") as log:
        run_stages(STAGES, FULL, run, Budget(5), (tmp_path, log), kept.append)
    assert [record.outcome for record in kept] == [Outcome.OUT_OF_TIME] * len(STAGES)
    assert not run.is_well


def write(path: Path, end: Outcome | None = Outcome.DONE) -> None:
    file = StringIO()
    journal = Journal(file, has_targets=True)
    journal.fact("device", "a card")
    journal.value("swap", "×", 0.85, Target(0.9, at_least=True))
    journal.value("errors", "", 0.0, Target(0.0))
    journal.point("chart", "line", 1.0, 2.0)
    journal.samples("swap", [0.8, 0.9])
    if end is not None:
        journal.end(end, "why")
    path.write_text(file.getvalue())


def read(path: Path) -> StageRecord:
    record = StageRecord("swap", "Swap")
    read_journal(path, record)
    return record


def test_everything_comes_back_and_a_missed_target_is_seen(tmp_path: Path) -> None:
    write(tmp_path / "journal")
    record = read(tmp_path / "journal")
    assert (record.outcome, record.reason) == (Outcome.DONE, "why")
    assert record.facts == {"device": "a card"}
    assert record.samples == {"swap": [0.8, 0.9]}
    assert [figure.label for figure in record.missed] == ["swap"]
    assert not record.is_well


def test_a_stage_that_was_ended_keeps_what_it_had_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, end=None)
    path.write_text(path.read_text() + '["figure", {"label": "ha')
    record = read(path)
    assert record.outcome is Outcome.OUT_OF_TIME
    assert len(record.figures) == 2


TESTS = f"""
import pytest
pytestmark = pytest.{cuda_tests.MARK}
def test_right(): pass
def test_wrong(): assert 1 == 2
def test_elsewhere(): pytest.skip("no")
"""


@pytest.mark.long
def test_each_end_is_counted_and_failures_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda: needs one\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    file = io.StringIO()
    context = StageContext(FULL, Journal(file, has_targets=True), time.monotonic() + 60, tmp_path)
    cuda_tests.report(context, cuda_tests.run_tests(["test_some.py"], tmp_path, 60))
    (tmp_path / "journal").write_text(file.getvalue())
    record = StageRecord("cuda_tests", "CUDA tests")
    read_journal(tmp_path / "journal", record)
    assert [figure.spread.median for figure in record.figures] == [1, 1, 1]
    assert record.notes == ["Failed: test_some::test_wrong"]
    assert not record.is_well
