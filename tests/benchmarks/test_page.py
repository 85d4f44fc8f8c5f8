"""What is made of the runs with and without the page."""

from __future__ import annotations

import pytest

from benchmarks.figures import figure_table
from benchmarks.page import PageRun, figures_of


@pytest.mark.parametrize(("with_page", "met"), [([0.101, 0.204, 0.303], "yes"), ([0.101, 0.206, 0.312], "no")])
def test_each_run_is_judged_beside_the_other_of_its_pair(with_page: list[float], met: str) -> None:
    run = PageRun(model="made up", agents=(), without_page_s=[0.1, 0.2, 0.3], with_page_s=with_page)
    *_, ratio = figure_table("made up", figures_of(run)).rows
    assert ratio[-1] == met
