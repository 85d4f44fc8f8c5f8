"""What is made of the turns of agents that somebody looks at."""

from __future__ import annotations

import pytest

from benchmarks.figures import figure_table
from benchmarks.page.__main__ import PageRun, Slice, figures_of, waits_by_looker
from benchmarks.page.agents import Resumed
from benchmarks.page.lookers import NOBODY, PAGE, READER


@pytest.mark.parametrize(("seen", "met"), [([0.101, 0.204, 0.303], "yes"), ([0.101, 0.206, 0.312], "no")])
def test_who_looks_is_judged_beside_nobody_in_the_same_run(seen: list[float], met: str) -> None:
    waits = {NOBODY: [[0.1], [0.2], [0.3]], READER: [[0.1], [0.2], [0.3]], PAGE: [[each] for each in seen]}
    *_, reader, page = figure_table("made up", figures_of(PageRun(model="made up", agents=(), waits_s=waits))).rows
    assert (reader[-1], page[-1]) == ("yes", met)


def test_a_turn_counts_for_whoever_looked_all_the_while() -> None:
    slices = [Slice(NOBODY, 0, 10), Slice(READER, 10, 20), Slice(PAGE, 20, 30)]
    turns = [Resumed(5, 0.5), Resumed(9.8, 0.5), Resumed(10.5, 0.2), Resumed(12, 0.3), Resumed(29, 0.75)]
    assert waits_by_looker(turns, slices) == {NOBODY: [0.5], READER: [0.3], PAGE: [0.75]}
