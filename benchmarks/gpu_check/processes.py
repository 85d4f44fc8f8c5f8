"""Stages in processes of their own, each ended when its time is over."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from benchmarks.gpu_check.child import run_stage
from benchmarks.gpu_check.overlay import ROOT
from benchmarks.gpu_check.plan import Plan, profiled
from benchmarks.gpu_check.reports.journal import Outcome, StageRecord, read_journal
from benchmarks.gpu_check.stage_list import Stage

GRACE_S = 3.0
"""Beyond its budget, for a stage that watches the clock itself."""


def run_alone(
    stage: Stage, plan: Plan, output: Path, log: IO[str], budget_s: float, trace: Path | None = None
) -> StageRecord:
    """The record of a stage that had `budget_s` seconds. What it prints goes to `log`.

    On a GPU it runs in a process of its own. On a CPU, where a stage takes no longer than the start of a process, it
    runs in this one.
    """
    record, began = StageRecord(stage.name, stage.title), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        if plan.device == "cpu":
            run_stage(stage, plan if trace is None else profiled(plan), journal, output, budget_s, trace)
        else:
            command = [stage.name, "--plan", plan.name, "--journal", str(journal), "--output", str(output)]
            command += ["--budget", f"{budget_s:.1f}", *([] if trace is None else ["--trace", str(trace)])]
            _note_end(record, run_for(command, log, budget_s + GRACE_S))
        if journal.exists():
            read_journal(journal, record)
    record.seconds = time.monotonic() - began
    return record


def _note_end(record: StageRecord, status: int | None) -> None:
    """What is to be said of a stage that could not say itself how it ended."""
    if status is None:
        record.reason = "its time was over"
    elif status != 0:
        record.outcome, record.reason = Outcome.FAILED, f"its process ended with status {status}"


def run_for(arguments: Sequence[str], log: IO[str], seconds: float) -> int | None:
    """Exit status of the child that has these arguments; None if it had to be killed after so many seconds."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.child", *arguments]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of it, a server that it has started in a session of its own included."""
    family = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
