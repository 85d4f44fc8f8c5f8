"""Figures show what they are given; an XML parser is the judge of the drawings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import Rectangle

from loadgen.results.figures import COLORS, Figure, color_of, style_of, to_png, to_svg
from loadgen.results.plots import Series, areas, bars, cdf, level, lines

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ("djinn & co", "<script>", "$5 a_b", "_hidden")


def two_lines(axes: Axes) -> None:
    lines(axes, [Series(name, [(0.0, 1.0), (1.0, place)]) for place, name in enumerate(NAMES)], "seconds", "turns")


def texts(drawing: str) -> list[str]:
    return ["".join(text.itertext()).strip() for text in ElementTree.fromstring(drawing).iter(f"{SVG}text")]


def test_every_name_is_text_in_the_drawing() -> None:
    found = texts(to_svg(Figure("title", "caption", two_lines)))
    assert {*NAMES, "seconds", "turns"} <= set(found)


def test_drawings_of_one_page_share_no_ids_and_lack_none() -> None:
    figure = Figure("title", "caption", two_lines)
    one, other = (to_svg(figure, prefix) for prefix in ("figure-0", "figure-1"))
    assert not _ids(one) & _ids(other)
    for drawing in (one, other):
        assert set(re.findall(r'(?:url\(|href=")#([^")]*)', drawing)) <= _ids(drawing)


def _ids(drawing: str) -> set[str]:
    return {found for element in ElementTree.fromstring(drawing).iter() if (found := element.get("id")) is not None}


def test_a_drawing_needs_nothing_from_elsewhere() -> None:
    drawing = to_svg(Figure("title", "caption", two_lines))
    assert not re.findall(r'(?:src|href)="(?!#)', drawing)
    assert "@import" not in drawing


def test_text_and_axes_take_the_colour_of_the_page() -> None:
    drawing = to_svg(Figure("title", "caption", two_lines))
    assert "currentColor" in drawing
    assert COLORS[0] in drawing


def test_the_same_figure_is_the_same_drawing() -> None:
    figure = Figure("title", "caption", two_lines)
    assert to_svg(figure) == to_svg(figure)


def test_a_picture_is_a_png(tmp_path: Path) -> None:
    figure = Figure("Turns, <in> flight!", "caption", two_lines)
    assert figure.slug == "turns-in-flight"
    to_png(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.fixture
def axes() -> Axes:
    return Drawing().subplots()


def test_a_distribution_keeps_the_colours_of_those_without_samples(axes: Axes) -> None:
    cdf(axes, {"none": [], "some": [3.0, 1.0, 2.0]}, "seconds")
    (line,) = axes.get_lines()
    assert line.get_color() == color_of(1)
    assert np.asarray(line.get_xdata()).tolist() == [1.0, 1.0, 2.0, 3.0]
    assert np.asarray(line.get_ydata()).tolist() == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])


@pytest.mark.parametrize(
    ("low", "high", "ticks"), [(0.02, 300.0, {"0.1", "1", "10", "100"}), (1.0, 9.0, {"1", "2", "5"})]
)
def test_logarithmic_axes_have_plain_numbers(low: float, high: float, ticks: set[str]) -> None:
    found = texts(to_svg(Figure("t", "c", lambda axes: cdf(axes, {"a": [low, high]}, "seconds", log=True))))
    assert ticks <= set(found)
    assert not any("$" in text or "^" in text for text in found)


def rectangles(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def test_stacked_bars_stand_on_each_other_and_none_is_no_bar(axes: Axes) -> None:
    bars(axes, ["a", "b"], {"one": [1.0, 2.0], "two": [3.0, None]}, "ms", stacked=True)
    assert [(bar.get_y(), bar.get_height()) for bar in rectangles(axes)] == [(0, 1), (0, 2), (1, 3), (2, 0)]


def test_bars_beside_each_other_do_not_overlap(axes: Axes) -> None:
    bars(axes, ["a", "b"], {"one": [1.0, 2.0], "two": [3.0, 4.0], "three": [5.0, 6.0]}, "ms")
    spans = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in rectangles(axes))
    assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(spans))


def test_a_series_without_bars_keeps_its_colour_and_takes_no_room(axes: Axes) -> None:
    bars(axes, ["a"], {"one": [1.0], "two": [None], "three": [3.0]}, "ms")
    alone = Drawing().subplots()
    bars(alone, ["a"], {"one": [1.0], "three": [3.0]}, "ms")
    assert [bar.get_x() for bar in rectangles(axes)] == [bar.get_x() for bar in rectangles(alone)]
    assert [to_hex(bar.get_facecolor()) for bar in rectangles(axes)] == [COLORS[0], COLORS[2]]


def test_linear_axes_begin_at_zero_unless_something_is_below(axes: Axes) -> None:
    lines(axes, [Series("a", [(5.0, 100.0), (9.0, 120.0)])], "x", "y")
    assert (axes.get_xlim()[0], axes.get_ylim()[0]) == (0, 0)
    below = Drawing().subplots()
    lines(below, [Series("a", [(-5.0, -1.0), (9.0, 2.0)])], "x", "y")
    assert below.get_xlim()[0] < -4
    assert below.get_ylim()[0] <= -1


def test_more_series_than_colours_differ_by_style() -> None:
    seen = {(color_of(number), style_of(number)) for number in range(3 * len(COLORS))}
    assert len(seen) == 3 * len(COLORS)


@pytest.mark.parametrize(
    "draw",
    [
        lambda axes: areas(axes, [0.0, 1.0], {"device": [1.0, 2.0], "host": [0.0, 3.0]}, "s", "sessions"),
        lambda axes: level(axes, 3.0, "room"),
        lambda axes: lines(axes, [Series("a", [(1.0, math.nan), (2.0, 3.0)])], "x", "y", log_x=True, log_y=True),
        lambda axes: lines(axes, [Series("a", [(1.0, 1.0)])], "x", "y", steps=True, markers=True),
        lambda axes: bars(axes, ["a rather long name indeed"] * 4, {}, "ms"),
    ],
)
def test_every_kind_of_plot_can_be_drawn(draw: Callable[[Axes], None]) -> None:
    ElementTree.fromstring(to_svg(Figure("t", "c", draw)))
