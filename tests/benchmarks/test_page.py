"""What is made of the turns of agents that somebody looks at."""

from __future__ import annotations

import pytest

from benchmarks.figures import figure_table
from benchmarks.page.__main__ import PageRun, Slice, cpu_by_looker, figures_of, waits_by_looker
from benchmarks.page.agents import Resumed
from benchmarks.page.lookers import NOBODY, PAGE, READER


@pytest.mark.parametrize(("seen", "met"), [([0.101, 0.204, 0.303], "yes"), ([0.101, 0.206, 0.312], "no")])
def test_who_looks_is_judged_beside_nobody_in_the_same_run(seen: list[float], met: str) -> None:
    waits = {NOBODY: [[0.1], [0.2], [0.3]], READER: [[0.1], [0.2], [0.3]], PAGE: [[each] for each in seen]}
    run = PageRun(model="made up", agents=(), cores=2, waits_s=waits, cpu={who: [0.1, 0.2, 0.3] for who in waits})
    lines = {line[0]: line[-1] for line in figure_table("made up", figures_of(run)).rows}
    assert (lines["first token, a reader over nobody"], lines["first token, the page over nobody"]) == ("yes", met)


@pytest.mark.parametrize(("page_s", "met"), [(0.13, "yes"), (0.15, "no")])
def test_what_the_servers_process_has_more_is_a_share_of_all_cores(page_s: float, met: str) -> None:
    slices = [Slice(NOBODY, 0, 10, 1), Slice(READER, 10, 20, 1.1), Slice(PAGE, 20, 25, 5 * page_s)]
    cpu = {who: [cost, cost] for who, cost in cpu_by_looker(slices).items()}
    waits = {who: [[0.1], [0.1]] for who in cpu}
    run = PageRun(model="made up", agents=(), cores=2, waits_s=waits, cpu=cpu)
    lines = {line[0]: line for line in figure_table("made up", figures_of(run)).rows}
    assert lines["a reader takes of all cores"][-1] == "yes"
    assert lines["the page takes of all cores"][-1] == met


def test_a_turn_counts_for_whoever_looked_all_the_while() -> None:
    slices = [Slice(NOBODY, 0, 10, 1), Slice(READER, 10, 20, 1), Slice(PAGE, 20, 30, 1)]
    turns = [Resumed(5, 0.5), Resumed(9.8, 0.5), Resumed(10.5, 0.2), Resumed(12, 0.3), Resumed(29, 0.75)]
    assert waits_by_looker(turns, slices) == {NOBODY: [0.5], READER: [0.3], PAGE: [0.75]}
