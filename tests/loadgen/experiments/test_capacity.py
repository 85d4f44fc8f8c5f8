"""`loadgen capacity`: the search for a border, and a server that holds a known number of agents."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.cli import main
from loadgen.experiments.capacity.search import Search
from tests.loadgen.experiments.conftest import interrupt, result, sessions_on, value
from tests.serving import serve

RANGES = st.tuples(st.integers(1, 50), st.integers(0, 500)).map(lambda pair: (pair[0], sum(pair)))


def finish(search: Search, holds: Callable[[int], bool]) -> list[int]:
    """Search to the end; returns the numbers that were probed."""
    probed: list[int] = []
    while (agents := search.next()) is not None:
        assert search.least <= agents <= search.most
        assert len(probed) < search.rounds * (search.most - search.least + 1)
        probed.append(agents)
        search.add(agents, holds(agents))
    return probed


@given(RANGES, st.integers(0, 600), st.integers(1, 5))
def test_a_border_is_found_exactly_and_with_few_probes(bounds: tuple[int, int], border: int, rounds: int) -> None:
    least, most = bounds
    search = Search(least, most, rounds)
    probed = finish(search, lambda agents: agents <= border)
    assert search.held == (None if border < least else min(border, most))
    assert search.failed == (None if border >= most else max(border + 1, least))
    doublings, halvings = math.ceil(math.log2(most / least)) + 1, math.ceil(math.log2(most))
    assert len(set(probed)) <= doublings + halvings
    assert {agents for agents, times in Counter(probed).items() if times > 1} <= {search.held, search.failed}


TURNS = 3
LOAD = f"""
    --turns {TURNS} --context 60 --resume-tokens 20 --completion-tokens 2 --system-tokens 8 --think 0:0 --most 4
    --slo-ttft 60 --slo-tpot 60
""".split()


def capacity(output: Path, *arguments: str) -> int:
    return main(["capacity", *LOAD, "--output", str(output), *arguments])


PROBES = "Probes"


def test_the_number_that_a_server_holds_is_found(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One server opens two sessions at most: three agents are refused."""
    with serve(max_sessions=2) as small:
        assert capacity(tmp_path, "--target", f"two={small}", "--target", f"many={url}") == 0
        assert sessions_on(small) == sessions_on(url) == []
    found = result(tmp_path, f"1 to 4 agents, {TURNS} turns each", "RateLimited")
    assert [value(found, "agents held", target=name) for name in ("two", "many")] == [2, 4]
    assert [row["agents"] for row in found.rows(PROBES) if row["target"] == "two"] == [1, 2, 4, 3]
    shown = capsys.readouterr().err
    assert "two, probe 4, 3 agents (2 held, 4 failed)" in shown
    assert "two: 3 agents failed: " in shown


@pytest.mark.long
def test_an_interrupted_search_leaves_its_probes(url: str, tmp_path: Path) -> None:
    """Ctrl-C comes while two agents think: in the second probe."""
    thinking = ["--turns", "2", "--think", "1:1", "--output", str(tmp_path)]
    command = ["capacity", "--target", f"one={url}", *LOAD, *thinking]
    interrupt(command, lambda: [each.info.phase for each in sessions_on(url)] == 2 * ["io_wait"])
    found = result(tmp_path)
    assert found.interrupted
    assert [row["agents"] for row in found.rows(PROBES)] == [1]
