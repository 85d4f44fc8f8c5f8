"""The page and the terminal show what was found, also what was missed and what failed."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console

from loadgen.experiments.whitebox.findings import Findings
from loadgen.experiments.whitebox.page import make_page
from loadgen.experiments.whitebox.plan import WhiteboxPlan
from loadgen.experiments.whitebox.report import TargetReport, WhiteboxReport, judge
from loadgen.experiments.whitebox.summary import summarize
from loadgen.experiments.whitebox.tables import tables
from loadgen.options.common import each_target
from loadgen.results.failures import Failure
from loadgen.results.files import read_result, write_result
from loadgen.results.inputs import Server, Texts
from loadgen.results.page import write_page
from loadgen.targets import TargetSpec
from tests.loadgen.experiments.whitebox.building import everything

SVG = "{http://www.w3.org/2000/svg}"


def report(findings: Findings, name: str = "djinn") -> WhiteboxReport:
    summary = summarize(findings)
    server = Server.of(TargetSpec(name, "http://host", api_key="sesame"))
    target = TargetReport(server, (3, 6), "sha", findings, summary, tuple(judge(summary, findings)))
    plan = WhiteboxPlan()
    return WhiteboxReport(seed=plan.seed, plan=plan, texts=Texts("text", "sha"), targets=(target,))


def page(findings: Findings, folder: Path, name: str = "djinn") -> str:
    return write_page(make_page(report(findings, name)), folder / "a.html").read_text("utf-8")


def test_every_table_is_on_the_page_and_on_the_terminal(tmp_path: Path) -> None:
    made = report(everything())
    text = unescape(page(everything(), tmp_path))
    console = Console(width=300, record=True, file=StringIO())
    console.print(each_target(made.targets, tables))
    printed = console.export_text()
    for table in tables(made.targets[0]):
        assert table.title in text
        assert table.title in printed
        for row in table.rows:
            assert all(f"{cell}</td>" in text and cell in printed for cell in row)


def test_the_plots_have_every_name(tmp_path: Path) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page(everything(), tmp_path), re.DOTALL)
    throughput, round_trips = ({"".join(t.itertext()) for t in _texts(drawing)} for drawing in drawings)
    assert {"one session paused", "none paused", "seconds", "tokens/s"} <= throughput
    assert {"resume to the next pause", "a token without pauses", "milliseconds"} <= round_trips


def _texts(drawing: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(drawing).iter(f"{SVG}text"))


def test_a_miss_and_a_failure_are_shown(tmp_path: Path) -> None:
    good = everything()
    failures = [Failure("steering", "Timeout", "<too> late")]
    bad = replace(good, trials=[replace(good.trials[0], paused=(9, 9, 9))], failures=failures, interrupted=True)
    text = page(bad, tmp_path)
    assert 'class="bad">missed<' in text
    assert "&lt;too&gt; late" in text
    assert "interrupted" in text


def test_a_run_without_figures_has_a_page(tmp_path: Path) -> None:
    text = page(Findings(interrupted=True), tmp_path)
    assert "<svg" not in text
    assert "not measured" in text


def test_names_do_not_become_markup(tmp_path: Path) -> None:
    assert "<script>" not in page(everything(), tmp_path, name="<script>")


def test_a_report_is_read_back_without_its_key(tmp_path: Path) -> None:
    made = report(everything())
    path = write_result(made, tmp_path / "a.json")
    found = read_result(path, WhiteboxReport)
    assert found.targets[0].findings == made.targets[0].findings
    assert found.targets[0].verdicts == made.targets[0].verdicts
    assert found.plan == made.plan
    assert "sesame" not in path.read_text()
