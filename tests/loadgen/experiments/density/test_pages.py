"""What is written of a run, or of several: a page, files, and what is made of them again."""

from __future__ import annotations

import csv
from dataclasses import replace
from html import unescape
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.experiments.density.figures import figures
from loadgen.experiments.density.outputs import COLUMNS, write_csv, write_density
from loadgen.experiments.density.page import differences, make_comparison, make_page
from loadgen.experiments.density.report import DensityReport, of_report, of_reports
from loadgen.experiments.density.tables import tables
from loadgen.load.arrivals import Arrivals
from loadgen.load.records import Run
from loadgen.load.trace import read_trace, trace_sha256
from loadgen.load.workload import Workload, plan_trace
from loadgen.results.files import read_result, write_result
from loadgen.results.page import Page, write_page
from loadgen.results.tables import TextTable, to_rich
from loadgen.stats import spread, summarize
from tests.loadgen.experiments.density.building import report


def table(made: DensityReport, title: str) -> TextTable:
    return next(table for table in tables(of_report(made)) if table.title == title)


def html(page: Page, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return unescape(write_page(page, folder / "a.html").read_text("utf-8"))


def test_every_table_is_on_the_page_and_on_the_terminal(tmp_path: Path) -> None:
    made = report()
    text = html(make_page(made), tmp_path)
    console = Console(width=200, file=StringIO(), record=True)
    console.print(to_rich(tables(of_report(made))))
    printed = console.export_text()
    for shown in tables(of_report(made)):
        assert shown.title in text
        assert shown.title in printed
        for row in shown.rows:
            assert all(f"{cell}</td>" in text and cell in printed for cell in row)


def test_turns_of_the_warm_up_are_in_no_figure_of_times() -> None:
    made = report(repeats=1)
    runs = made.targets[0].runs
    warmup_s = 1.0 + max(turn.sent_s for run in runs for turn in run.turns)
    cold = replace(made, measurement=replace(made.measurement, warmup_s=warmup_s))
    assert len(of_report(made)[0].measured_turns) == len(runs[0].turns)
    assert of_report(cold)[0].measured_turns == []
    assert "Time to first token, resumed turns" not in [figure.title for figure in figures(of_report(cold)[:1])]


def test_targets_stand_side_by_side_with_their_factor() -> None:
    """The second target's times are twenty times the first's, draw by draw."""
    made = report({"djinn": 0.1, "vllm": 2.0})
    rows = {row[0]: row[1:] for row in table(made, "Side by side").rows}
    assert rows["turns completed"] == ("22 of 24", "22 of 24")
    assert "(20×)" in rows["TTFT, resumed, p50, ms"][1]
    assert "(" not in rows["TTFT, resumed, p50, ms"][0]
    assert rows["wake-up, p99, ms"][1] == ""


def test_runs_are_compared_under_names_that_differ(tmp_path: Path) -> None:
    reports = [report({"djinn": 0.2}), report({"djinn": 0.1, "vllm": 2.0})]
    assert [target.name for target in of_reports(reports)] == ["djinn (1)", "djinn (2)", "vllm"]
    text = html(make_comparison(["old.json", "new.json"], reports), tmp_path)
    assert "(1) old.json: 4 agents" in text
    assert text.count("Time to first token, resumed turns") == 1
    assert "(0.5×)" in text
    assert "different" not in text
    other = report(load=Workload(agents=5, turns=2))
    told = list(differences([report(), replace(other, texts=replace(other.texts, sha256="2"))]))
    assert ["traces" in sentence for sentence in told] == [True, False]
    assert "texts" in told[1]


def test_the_page_says_what_was_run_on_what_and_what_failed(tmp_path: Path) -> None:
    load = Workload(agents=4, turns=3, rate=2.0, arrivals=Arrivals.GAMMA, burstiness=0.5, eta_noise=0.3)
    made = report(load=load)
    text = html(make_page(made), tmp_path)
    for words in (
        "python -m loadgen density --target djinn --target vllm",
        "4 agents, 2 a second (gamma, burstiness 0.5), 3 turns each",
        "signals: eta, off by a lognormal factor of sigma 0.3.",
        "a turn is good with TTFT within 1000 ms",
        "on avx2 avx512f, 2 CPUs",
        "djinn serve --kv-device 900MiB",
        "2 repeats",
        "the <queue> is full",
    ):
        assert words in text
    assert text.count("<svg") == len(figures(of_report(made))) == 6
    nothing = (Run(interrupted=True),)
    summary = summarize(nothing, 12, made.measurement)
    targets = tuple(replace(each, runs=nothing, summary=summary, spread=spread([summary])) for each in made.targets)
    empty = html(make_page(replace(made, targets=targets)), tmp_path / "empty")
    assert "<svg" not in empty
    assert "12 (interrupted)" in empty


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
    failed = [line for line in lines if line["error"]]
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
