"""What a page of a run, or of several, says."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.experiments.density.curves import completed, device_budget, in_flight, mean_parts
from loadgen.experiments.density.figures import figures
from loadgen.experiments.density.page import differences, make_comparison, make_page
from loadgen.experiments.density.report import DensityReport, of_report, of_reports
from loadgen.experiments.density.tables import tables
from loadgen.load.arrivals import Arrivals
from loadgen.load.records import Run
from loadgen.load.trace import planned_turns
from loadgen.load.workload import Workload, plan_trace
from loadgen.results.page import Page, write_page
from loadgen.results.tables import TextTable, to_rich
from loadgen.stats import spread, summarize
from tests.loadgen.experiments.density.building import DEVICE_BYTES, report, run_of


def table(made: DensityReport, title: str) -> TextTable:
    return next(table for table in tables(of_report(made)) if table.title == title)


def html(page: Page, folder: Path) -> str:
    return unescape(write_page(page, folder / "a.html").read_text("utf-8"))


def empty(made: DensityReport) -> DensityReport:
    """The same, interrupted before anything was seen."""
    runs = (Run(interrupted=True),)
    summary = summarize(runs, 12, made.measurement)
    targets = tuple(replace(target, runs=runs, summary=summary, spread=spread([summary])) for target in made.targets)
    return replace(made, targets=targets)


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


def test_the_page_says_what_was_run_and_on_what(tmp_path: Path) -> None:
    text = html(make_page(report()), tmp_path)
    for words in (
        "python -m loadgen density --target djinn --target vllm",
        "4 agents, 2 a second (poisson), 3 turns each",
        "signals: eta, exact.",
        "a turn is good with TTFT within 1000 ms",
        "on avx2 avx512f, 2 CPUs",
        "djinn serve --kv-device 900MiB",
        "2 repeats",
    ):
        assert words in text


def test_the_page_says_how_well_agents_know_when_they_come_back(tmp_path: Path) -> None:
    load = Workload(arrivals=Arrivals.GAMMA, burstiness=0.5, eta_noise=0.3, turns=2)
    text = html(make_page(report(load=load)), tmp_path)
    assert "(gamma, burstiness 0.5)" in text
    assert "signals: eta, off by a lognormal factor of sigma 0.3." in text


def test_the_figures_of_the_contract_are_there() -> None:
    titles = [figure.title for figure in figures(of_report(report()))]
    assert titles == [
        "Time to first token, resumed turns",
        "Where a resumed turn waits for its first token",
        "Sessions per tier: djinn",
        "KV on the device",
        "Turns completed",
        "Turns in flight",
    ]


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


def test_percentiles_are_in_milliseconds() -> None:
    made = report({"djinn": 0.1}, repeats=1)
    found = made.targets[0].summary.ttft_resumed_s
    assert found is not None
    row = next(row for row in table(made, "Milliseconds").rows if row[0] == "TTFT, resumed turns")
    assert row[1] == "djinn"
    assert float(row[3].replace(",", "")) == pytest.approx(1000 * found.p50, rel=0.01)
    assert float(row[7].replace(",", "")) == pytest.approx(1000 * found.max, rel=0.01)


def test_what_moved_is_told_by_direction() -> None:
    rows = table(report({"djinn": 0.1}), "KV moved").rows
    assert rows == [
        ("djinn", "device to host", "80", "1,920.0", "1.80", "1.12"),
        ("", "host to device", "62", "1,488.0", "1.40", "1.11"),
    ]


def test_one_repeat_has_no_spread_and_several_have() -> None:
    assert all(shown.title != "Spread over repeats" for shown in tables(of_report(report(repeats=1))))
    three = table(report(repeats=3), "Spread over repeats")
    assert three.header == ("", "target", "repeat 1", "repeat 2", "repeat 3", "least", "greatest")


def test_failures_are_shown(tmp_path: Path) -> None:
    made = report()
    assert ("djinn", "RateLimited", "the <queue> is full", "2") in table(made, "What failed").rows
    page = write_page(make_page(made), tmp_path / "a.html").read_text("utf-8")
    assert "the &lt;queue&gt; is full" in page


def test_an_interrupted_run_without_a_turn_has_a_page(tmp_path: Path) -> None:
    made = empty(report())
    text = html(make_page(made), tmp_path)
    assert "<svg" not in text
    assert "12 (interrupted)" in text


def test_runs_are_compared_under_names_that_differ(tmp_path: Path) -> None:
    reports = [report({"djinn": 0.2}), report({"djinn": 0.1, "vllm": 2.0})]
    assert [target.name for target in of_reports(reports)] == ["djinn (1)", "djinn (2)", "vllm"]
    text = html(make_comparison(["old.json", "new.json"], reports), tmp_path)
    assert "(1) old.json: 4 agents" in text
    assert text.count("Time to first token, resumed turns") == 1
    assert "(0.5×)" in text
    assert "different" not in text


def test_what_cannot_be_compared_is_said() -> None:
    other = report(load=Workload(agents=5, turns=2))
    told = list(differences([report(), replace(other, texts=replace(other.texts, sha256="2"))]))
    assert ["traces" in sentence for sentence in told] == [True, False]
    assert "texts" in told[1]


def test_curves_count_every_turn() -> None:
    trace = plan_trace(Workload(agents=4, turns=3, rate=2.0, completion_tokens=5))
    run = run_of(trace, 0.1, 1)
    assert completed(run)[-1] == (run.duration_s, planned_turns(trace) - 1)
    times, heights = zip(*in_flight(run), strict=True)
    assert (times[-1], heights[-1]) == (run.duration_s, 0)
    assert max(heights) >= 1
    assert min(heights) == 0


def test_the_devices_room_comes_from_what_is_used() -> None:
    run = run_of(plan_trace(Workload(agents=2, turns=2)), 0.1, 1)
    assert device_budget(run) == DEVICE_BYTES
    assert device_budget(Run()) is None


def test_parts_add_up_to_the_time_to_first_token() -> None:
    djinn, vllm = report().targets
    parts, ttft = mean_parts(djinn.summary), djinn.summary.ttft_resumed_s
    assert parts is not None
    assert ttft is not None
    assert sum(parts.values()) == pytest.approx(ttft.mean)
    assert mean_parts(vllm.summary) is None
