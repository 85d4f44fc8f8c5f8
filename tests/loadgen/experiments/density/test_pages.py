"""What is written of a run, or of several: a page, files, and what is made of them again."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from pathlib import Path

from loadgen.experiments.density.figures import figures
from loadgen.experiments.density.page import differences, make_comparison, make_page
from loadgen.experiments.density.report import DensityReport, of_report, of_reports
from loadgen.experiments.density.tables import tables
from loadgen.load.arrivals import Arrivals
from loadgen.load.records import Run
from loadgen.load.workload import Workload
from loadgen.results.page import Page, write_page
from loadgen.results.tables import TextTable
from loadgen.stats import spread, summarize
from tests.loadgen.experiments.density.building import report


def table(made: DensityReport, title: str) -> TextTable:
    return next(table for table in tables(of_report(made)) if table.title == title)


def html(page: Page, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return unescape(write_page(page, folder / "a.html").read_text("utf-8"))


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
