"""Stages in processes of their own."""

import tempfile
from dataclasses import asdict
from pathlib import Path

import psutil

from benchmarks.gpu_check.plan import FULL
from benchmarks.gpu_check.processes import run_for
from benchmarks.gpu_check.reports.journal import Outcome, StageRecord, read_journal
from benchmarks.gpu_check.reports.record import describe_run
from benchmarks.gpu_check.runner import Budget, run_stages
from benchmarks.gpu_check.stage_list import STAGES


def arguments(stage: str, journal: Path, output: Path) -> list[str]:
    options = ["--plan", "tiny", "--journal", str(journal), "--output", str(output), "--budget", "60"]
    return [stage, *options]


def test_a_stage_says_in_its_journal_what_it_found(tmp_path: Path) -> None:
    journal, record = tmp_path / "journal", StageRecord("copies", "Plain copies")
    with tempfile.TemporaryFile("w+") as log:
        assert run_for(arguments("copies", journal, tmp_path), log, 60) == 0

    read_journal(journal, record)
    assert record.outcome is Outcome.DONE
    assert record.figures


def test_a_stage_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with tempfile.TemporaryFile("w+") as log:
        assert run_for(arguments("copies", tmp_path / "journal", tmp_path), log, 0.1) is None
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_stage_without_a_gpu_or_without_time_is_not_begun(tmp_path: Path) -> None:
    run, kept = describe_run("cuda", asdict(FULL), []), list[StageRecord]()
    with tempfile.TemporaryFile("w+") as log:
        run_stages(STAGES, FULL, run, Budget(5), (tmp_path, log), kept.append)

    assert [record.outcome for record in kept] == [Outcome.OUT_OF_TIME] * len(STAGES)
    assert not run.is_well
