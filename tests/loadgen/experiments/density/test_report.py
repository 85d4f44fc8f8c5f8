"""A report, what is written of it, and what is made of it again."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.experiments.density.outputs import COLUMNS, write_csv, write_density
from loadgen.experiments.density.report import DensityReport
from loadgen.load.trace import read_trace, trace_sha256
from loadgen.load.workload import Replay, Workload, plan_trace
from loadgen.results.files import read_result, write_result
from loadgen.results.inputs import Server
from loadgen.targets import TargetSpec
from tests.loadgen.experiments.density.building import report


def test_a_report_is_read_back(tmp_path: Path) -> None:
    made = report()
    found = read_result(write_result(made, tmp_path / "a.json"), DensityReport)
    for mine, read in zip(made.targets, found.targets, strict=True):
        assert read.server == mine.server
        assert read.summary.turn_errors == {"RateLimited": 2}
        assert [len(run.turns) for run in read.runs] == [len(run.turns) for run in mine.runs]
        assert read.runs[0].turns[-1].ttft_s == pytest.approx(mine.runs[0].turns[-1].ttft_s)
        assert read.runs[0].samples[-1].bytes == mine.runs[0].samples[-1].bytes
    assert found.workload == made.workload
    assert found.measurement == made.measurement


@pytest.mark.parametrize("load", [Workload(rate=math.inf, agents=2), Workload(agents=3)])
def test_a_drawn_load_is_read_back_as_such(load: Workload, tmp_path: Path) -> None:
    found = read_result(write_result(report(load=load), tmp_path / "a.json"), DensityReport)
    assert found.workload == load


def test_a_replayed_load_is_read_back_as_such(tmp_path: Path) -> None:
    load = Replay(trace=Path("agents.jsonl"), time_scale=0.5)
    found = read_result(write_result(replace(report(), workload=load), tmp_path / "a.json"), DensityReport)
    assert found.workload == load


def test_no_key_is_in_it(tmp_path: Path) -> None:
    made = report()
    spec = TargetSpec("djinn", "http://host", api_key="sesame", command=("djinn", "serve"))
    target = replace(made.targets[0], server=Server.of(spec))
    path = write_result(replace(made, targets=(target,)), tmp_path / "a.json")
    assert "sesame" not in path.read_text()
    assert json.loads(path.read_text())["targets"][0]["server"]["command"] == ["djinn", "serve"]


def test_every_turn_is_a_line(tmp_path: Path) -> None:
    made = report()
    with write_csv(made, tmp_path / "a.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    completed = [line for line in lines if not line["error"]]
    records = [record for target in made.targets for run in target.runs for record in run.turns]
    assert [float(line["ttft_s"]) for line in completed] == [record.ttft_s for record in records]
    assert {line["queue_ms"] for line in completed if line["target"] == "vllm"} == {""}
    assert {(line["target"], line["repeat"]) for line in lines} == {
        (target.server.name, str(repeat)) for target in made.targets for repeat in range(2)
    }


def test_failed_turns_are_lines_too(tmp_path: Path) -> None:
    with write_csv(report(), tmp_path / "a.csv").open(newline="") as file:
        failed = [line for line in csv.DictReader(file) if line["error"]]
    assert len(failed) == 4
    assert {(line["agent"], line["turn"], line["ttft_s"]) for line in failed} == {("1", "2", "")}
    assert {line["message"] for line in failed} == {"the <queue> is full"}


def test_a_run_leaves_all_its_files_and_can_be_run_again(tmp_path: Path) -> None:
    made = report()
    assert isinstance(made.workload, Workload)
    trace = plan_trace(made.workload)
    written = write_density(made, trace, tmp_path)
    assert sorted(written) == sorted(tmp_path.iterdir())
    assert {path.suffix for path in written} == {".json", ".html", ".csv", ".jsonl", ".png"}
    (replay,) = tmp_path.glob("trace-*.jsonl")
    assert trace_sha256(read_trace(replay)) == made.trace_sha256
