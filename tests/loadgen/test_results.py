"""Results: files that are read back, figures and their targets, tables, and pages that need nothing else."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.errors import LoadgenError
from loadgen.report.page import write_outputs
from loadgen.report.report import Chart, Report, read_report, write_report
from loadgen.report.tables import Figure, Row, Spread, Table, Target, all_of, exact, pivot, to_markdown, to_rich

NAMES = ("djinn & co", "<script>", "$5 a_b", "_hidden")
POINTS: list[Row] = [{"of": n, "x": x, "y": x * place} for place, n in enumerate(NAMES) for x in (1.0, 2.0)]
CHART = Chart("Figure 1", "caption 1", "lines", "points", "x", "y", "of", x_label="seconds", y_label="turns")
TABLE = Table("Table <1>", [{"": "a & b", "x": 1.5, "end": "missed"}, {"": "c", "x": None}], "a note")
REPORT = Report(
    experiment="sums",
    title="Title <&>",
    lead=("lead one",),
    plan={"seed": 3},
    figures=(all_of("right answers", 3, 4, {"target": "a"}), exact("speed", "×", 2.0, Target(1.0, at_least=True))),
    tables=(TABLE, Table("points", POINTS, shown=False)),
    charts=(CHART, CHART),
    command=("python",),
)


def test_a_report_is_read_back_as_it_was_and_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    path = write_report(REPORT, tmp_path / "sums-1.json")
    found = read_report(path, "sums")
    assert (found.figures, found.rows("points"), found.started_at) == (REPORT.figures, POINTS, REPORT.started_at)
    assert write_report(found, tmp_path / "sums-2.json").read_bytes() == path.read_bytes()
    odd = replace(REPORT, tables=(Table("odd", [{"x": math.nan}, {"x": math.inf}]),))
    text = write_report(odd, tmp_path / "odd.json").read_text()
    raw = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert raw["tables"][0]["rows"] == [{"x": None}, {"x": None}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a result of sums"),
        ('{"experiment": "kv", "schema_version": 4}', "is not a result of sums, but of kv"),
        ('{"experiment": "sums", "schema_version": 3}', "has schema_version 3, but only 4"),
        ('{"experiment": "sums", "schema_version": 4}', "is damaged at title"),
    ],
)
def test_what_is_no_such_result_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(LoadgenError) as refused:
        read_report(path, "sums")
    assert f"{path} {message}" in str(refused.value)


@pytest.mark.parametrize(
    ("spread", "outcome"),
    [
        (Spread(1.0, 0.5, 2.0, 3), "met"),
        (Spread(0.9, 0.5, 2.0, 3), "within the noise"),
        (Spread(0.9, 0.5, 0.95, 3), "missed"),
        (None, "not measured"),
    ],
)
def test_a_figure_is_held_against_its_target(spread: Spread | None, outcome: str) -> None:
    assert Figure("", "×", spread, Target(1.0, at_least=True)).outcome == outcome
    assert Figure("", "×", spread).outcome is None


def test_figures_are_put_side_by_side() -> None:
    figures = [exact("wait", "ms", value, by={"target": name}) for name, value in (("a", 20.0), ("b", 10.0))]
    text = to_markdown(pivot("Side by side", figures, "target", ratios=True))
    assert "| wait, ms | 20 | 10 (0.5×) |" in text


def test_the_page_is_whole_has_everything_and_loads_nothing_and_its_charts_are_pictures_too(tmp_path: Path) -> None:
    data, page, *more = write_outputs(REPORT, tmp_path)
    text = page.read_text("utf-8")
    assert re.findall(r'(?:src|href)="(?!#)', text) == []
    for words in ("Title &lt;&amp;&gt;", "lead one", "caption 1", "Table &lt;1&gt;", "a note", "right answers"):
        assert words in text
    assert text.count("<svg") == 2
    assert "a &amp; b</td>" in text
    assert 'bad">missed</td>' in text
    pictures = [f"{data.stem}-figure-1.png", f"{data.stem}-figure-1-2.png"]
    assert [path.name for path in more] == [*pictures, f"{data.stem}.csv"]
    assert all(path.stat().st_size > 1000 for path in more[:2])


def test_columns_that_do_not_fit_come_below_with_what_rows_are_of(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Row] = [{"of": "djinn", "at once": n} | {f"figure number {i}": n + i for i in range(6)} for n in (1, 2)]
    Console(width=60).print(to_rich([Table("t", rows)]))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 60
    assert shown.count("djinn") == shown.count("at once") == 3
    assert all(f"figure number {i}" in shown for i in range(6))
