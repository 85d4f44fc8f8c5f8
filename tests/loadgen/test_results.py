"""Results: files that are read back, units, what failed, and pages; an XML parser is the judge of the drawings."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from matplotlib.axes import Axes

from loadgen.errors import LoadgenError
from loadgen.load.think import InfinityAsNull
from loadgen.options.common import finish
from loadgen.results.figures import Figure
from loadgen.results.files import Result, read_result, write_result
from loadgen.results.page import Page, Section, write_page, write_pictures
from loadgen.results.plots import Series, lines
from loadgen.results.tables import Mark, TextTable


@dataclass(frozen=True, slots=True)
class Part:
    numbers: tuple[float, ...]
    limit: InfinityAsNull = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums(Result):
    experiment: Literal["sums"] = "sums"
    parts: dict[str, Part]

    @property
    def interrupted(self) -> bool:
        return False

    @property
    def succeeded(self) -> bool:
        return True


SUMS = Sums(seed=3, command=("python",), parts={"a [1,\n 2]": Part((1.5, 2.0)), "b": Part((), 7.0)})


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    report = Sums(seed=0, parts={"x": Part((math.nan, math.inf, -math.inf, 1.0))})
    text = write_result(report, tmp_path / "a.json").read_text()
    part = json.loads(text, parse_constant=lambda name: pytest.fail(name))["parts"]["x"]
    assert part == {"numbers": [None, None, None, 1.0], "limit": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"experiment": "kv", "schema_version": 3}', "is not a result of sums, but of kv"),
        ('{"experiment": "sums", "schema_version": 1}', "has schema_version 1, but only 3"),
        ('{"experiment": "sums", "schema_version": 3}', "is old, and lacks seed: measure again"),
    ],
)
def test_what_is_no_such_result_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(LoadgenError) as refused:
        read_result(path, Sums)
    assert f"{path} {message}" in str(refused.value)


def test_figures_are_shown_also_where_no_file_can_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> Sequence[Path]:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        finish(SUMS, "figures", write)
    assert "figures" in capsys.readouterr().out


# Pages: one file in which everything is.

NAMES = ("djinn & co", "<script>", "$5 a_b", "_hidden")


def draw(axes: Axes) -> None:
    lines(axes, [Series(name, [(0.0, 1.0), (1.0, place)]) for place, name in enumerate(NAMES)], "seconds", "turns")


FIGURES = (Figure("Figure 1", "caption 1", draw), Figure("Figure 1", "again", draw))
TABLE = TextTable("Table <1>", ("", "x"), [("a & b", "1"), ("", "missed")], "a note", marks={"missed": Mark.BAD})
PAGE = Page("Title <&>", ("lead one",), (Section("First", "text", FIGURES), Section("Second", tables=(TABLE,))))


def test_the_page_is_whole_has_everything_and_loads_nothing_and_its_figures_are_pictures_too(tmp_path: Path) -> None:
    text = write_page(PAGE, tmp_path / "a.html").read_text("utf-8")
    assert re.findall(r'(?:src|href)="(?!#)', text) == []
    for words in ("Title &lt;&amp;&gt;", "lead one", "First", "text", "caption 1", "Table &lt;1&gt;", "a note"):
        assert words in text
    assert text.count("<svg") == 2
    assert "a &amp; b</td>" in text
    assert '<td class="bad">missed</td>' in text
    pictures = write_pictures(PAGE, tmp_path / "a.html")
    assert [path.name for path in pictures] == ["a-figure-1.png", "a-figure-1-2.png"]
    assert all(path.stat().st_size > 1000 for path in pictures)
