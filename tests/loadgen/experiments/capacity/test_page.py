"""What the page and the terminal say of a search, and that its file is what the schema says."""

from __future__ import annotations

from html import unescape
from pathlib import Path

from loadgen.experiments.capacity.page import figures, make_page
from loadgen.experiments.capacity.tables import held_table, tables
from loadgen.results.page import write_page
from tests.loadgen.experiments.capacity.building import report


def test_each_target_says_what_it_holds_and_why_not_more() -> None:
    rows = held_table(report()).rows
    assert rows == [
        ("djinn", "4", "5", "first token of a resumed turn: p95 1.50 s, 1.5 times the limit"),
        ("vllm", "8", "", ""),
        ("llamacpp", "none", "2", "errors: RateLimited 1"),
    ]


def test_the_page_has_every_table_and_both_curves(tmp_path: Path) -> None:
    made = report()
    text = unescape(write_page(make_page(made), tmp_path / "a.html").read_text("utf-8"))
    assert [figure.title for figure in figures(made)] == ["p95 of resumed first tokens", "p95 of time per token"]
    assert text.count("<svg") == 2
    assert text.count(">limit<") == 2
    for shown in tables(made):
        assert all(f"{cell}</td>" in text for row in shown.rows for cell in row)
    assert "2 to 8 agents, 3 turns each" in text
