"""The page is one well-formed file with every figure in it; an XML parser is the judge of its drawings."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from html import unescape
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from loadgen.corpus import Corpus
from loadgen.targets import TargetSpec
from loadgen.whitebox.chart import Chart, Line, to_svg
from loadgen.whitebox.findings import Failure, Findings
from loadgen.whitebox.page import write_page
from loadgen.whitebox.plan import WhiteboxPlan
from loadgen.whitebox.report import TargetReport, WhiteboxReport
from loadgen.whitebox.summary import summarize
from loadgen.whitebox.tables import render, tables
from loadgen.whitebox.verdicts import judge
from tests.loadgen.whitebox.building import everything

SVG = "{http://www.w3.org/2000/svg}"


def report(findings: Findings, name: str = "djinn") -> WhiteboxReport:
    summary = summarize(findings)
    spec = TargetSpec(name, "http://host", api_key="secret")
    target = TargetReport(spec, (3, 6), "sha", findings, summary, judge(summary, findings))
    return WhiteboxReport(datetime(2026, 1, 2, tzinfo=UTC), WhiteboxPlan(), Corpus("text", "", ("x",)), [target])


def page(findings: Findings, folder: Path, name: str = "djinn") -> str:
    return write_page(report(findings, name), folder).read_text("utf-8")


def test_every_table_is_on_the_page_and_on_the_terminal(tmp_path: Path) -> None:
    made = report(everything())
    text = unescape(page(everything(), tmp_path))
    console = Console(width=300, record=True, file=StringIO())
    console.print(render(made))
    printed = console.export_text()
    for table in tables(made.targets[0]):
        assert table.title in text
        assert table.title in printed
        for row in table.rows:
            assert all(f"{cell}</td>" in text and cell in printed for cell in row)
    assert "secret" not in text


def test_the_plots_are_well_formed_and_have_every_line(tmp_path: Path) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page(everything(), tmp_path), re.DOTALL)
    throughput, round_trips = (ElementTree.fromstring(drawing) for drawing in drawings)
    assert [len(drawing.findall(f"{SVG}polyline")) for drawing in (throughput, round_trips)] == [2, 2]
    names = {text.text for text in throughput.iter(f"{SVG}text")}
    assert {"one session paused", "none paused", "seconds", "tokens/s"} <= names


def test_a_miss_and_a_failure_are_shown(tmp_path: Path) -> None:
    good = everything()
    failures = [Failure("steering", "Timeout", "<too> late")]
    bad = replace(good, trials=[replace(good.trials[0], paused=(9, 9, 9))], failures=failures, interrupted=True)
    text = page(bad, tmp_path)
    assert 'class="missed">missed<' in text
    assert "&lt;too&gt; late" in text
    assert "interrupted" in text


def test_a_run_without_figures_has_a_page(tmp_path: Path) -> None:
    text = page(Findings(interrupted=True), tmp_path)
    assert "<svg" not in text
    assert "not measured" in text


def test_names_do_not_become_markup(tmp_path: Path) -> None:
    assert "<script>" not in page(everything(), tmp_path, name="<script>")
    lines = [Line("<b>", 0, [(0.0, 0.0)])]
    ElementTree.fromstring(to_svg(Chart("<&>", "<x>", "y & z", lines)))


@pytest.mark.parametrize("points", [[(0.0, 0.0)], [(1.0, 2.0), (3.0, 0.5)]])
def test_lines_stay_inside_the_drawing(points: list[tuple[float, float]]) -> None:
    drawing = ElementTree.fromstring(to_svg(Chart("title", "x", "y", [Line("line", 0, points)])))
    (line,) = drawing.findall(f"{SVG}polyline")
    _, _, width, height = map(float, drawing.attrib["viewBox"].split())
    for point in line.attrib["points"].split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= width
        assert 0 <= y <= height
