"""What the page and the terminal say of a search, and that its file is what the schema says."""

from __future__ import annotations

import json
from dataclasses import replace
from html import unescape
from pathlib import Path

from jsonschema import Draft202012Validator

from loadgen.experiments.capacity.page import curves, figures, make_page
from loadgen.experiments.capacity.report import CapacityReport, Findings
from loadgen.experiments.capacity.tables import course_table, held_table, probe_table, tables
from loadgen.results.failures import Failure
from loadgen.results.files import read_result, write_result
from loadgen.results.page import write_page
from tests.loadgen.experiments.capacity.building import probe, report

SCHEMA = Path(__file__).parents[4] / "docs/schemas/capacity.json"


def with_findings(made: CapacityReport, findings: Findings) -> CapacityReport:
    """The report of its first target alone, with other findings."""
    return replace(made, targets=(replace(made.targets[0], findings=findings),))


def test_each_target_says_what_it_holds_and_why_not_more() -> None:
    rows = held_table(report()).rows
    assert rows == [
        ("djinn", "4", "5", "first token of a resumed turn: p95 1.50 s, 1.5 times the limit"),
        ("vllm", "8", "", ""),
        ("llamacpp", "none", "2", "errors: RateLimited 1"),
    ]


def test_every_probe_is_a_row() -> None:
    rows = probe_table(report().targets).rows
    assert [row[:3] for row in rows[:4]] == [
        ("djinn", "2", "held"),
        ("", "4", "held"),
        ("", "8", "failed"),
        ("", "5", "failed"),
    ]
    assert rows[0][3:5] == ("200 / 200", "50.0 / 50.0")
    assert course_table(report().targets).rows[-1][:4] == ("llamacpp", "2", "5 of 6", "RateLimited 1")


def test_several_rounds_are_one_point() -> None:
    found = Findings([probe(2, ttft, number=number) for number, ttft in enumerate((0.1, 0.9, 0.3))], 2, None)
    (series,) = curves(with_findings(report(), found), lambda probe: probe.summary.ttft_resumed_s)
    assert series.points == [(2.0, 0.3)]


def test_the_page_has_every_table_and_both_curves(tmp_path: Path) -> None:
    made = report()
    text = unescape(write_page(make_page(made), tmp_path / "a.html").read_text("utf-8"))
    assert [figure.title for figure in figures(made)] == ["p95 of resumed first tokens", "p95 of time per token"]
    assert text.count("<svg") == 2
    assert text.count(">limit<") == 2
    for shown in tables(made):
        assert all(f"{cell}</td>" in text for row in shown.rows for cell in row)
    assert "2 to 8 agents, 3 turns each" in text


def test_a_search_that_did_not_end_says_so(tmp_path: Path) -> None:
    failures = [Failure("the search", "LoadgenError", "djinn did not come up")]
    broken = with_findings(report(), Findings([probe(2, 0.2)], 2, None, failures=failures))
    assert held_table(broken).rows == [("djinn", "at least 2", "", "")]
    assert "djinn did not come up" in write_page(make_page(broken), tmp_path / "a.html").read_text("utf-8")
    nothing = with_findings(report(), Findings(interrupted=True))
    assert held_table(nothing).rows == [("djinn", "unknown", "", "")]
    assert "<svg" not in write_page(make_page(nothing), tmp_path / "b.html").read_text("utf-8")


def test_the_file_is_what_the_schema_says_and_is_read_back(tmp_path: Path) -> None:
    path = write_result(report(), tmp_path / "a.json")
    Draft202012Validator(json.loads(SCHEMA.read_text("utf-8"))).validate(json.loads(path.read_text("utf-8")))
    found = read_result(path, CapacityReport)
    assert list(tables(found)) == list(tables(report()))
    assert found.plan == report().plan
