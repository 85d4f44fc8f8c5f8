"""A trace's file gives back the trace, is the same bytes everywhere, and says which line is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import LoadgenError
from loadgen.load.think import LogNormal
from loadgen.load.trace import (
    AgentPlan,
    TurnPlan,
    read_trace,
    scaled,
    trace_sha256,
    write_trace,
)
from loadgen.load.workload import Workload, plan_trace

LAST = TurnPlan(32, 8, None, None, tool=False)
TRACE = (
    AgentPlan(0.1, (TurnPlan(100, 10, 2.5, 3.5, tool=False), LAST)),
    AgentPlan(1 / 3, (TurnPlan(100, 20, 0.0, None, tool=True), LAST)),
)


seconds = st.floats(0, allow_nan=False, allow_infinity=False)
tokens = st.integers(1, 10**6)


@st.composite
def agents(draw: st.DrawFn) -> AgentPlan:
    earlier = st.builds(TurnPlan, tokens, tokens, seconds, st.none() | seconds, tool=st.booleans())
    last = st.builds(TurnPlan, tokens, tokens, st.none(), st.none(), tool=st.booleans())
    return AgentPlan(draw(seconds), (*draw(st.lists(earlier, max_size=4)), draw(last)))


@given(st.lists(agents(), min_size=1, max_size=5).map(tuple))
def test_reading_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, trace: Any) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    write_trace(trace, path)
    assert read_trace(path) == trace
    assert trace_sha256(trace) == hashlib.sha256(path.read_bytes()).hexdigest()


WRITE = """
import sys
from pathlib import Path
from loadgen.load.think import LogNormal
from loadgen.load.trace import write_trace
from loadgen.load.workload import Workload, plan_trace
write_trace(plan_trace(eval(sys.argv[1])), Path(sys.argv[2]))
"""


def test_the_same_seed_is_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    workload = "Workload(20, turns=5, think=LogNormal(9.0, 0.7), eta_noise=0.3, tool_share=0.4, seed=11)"
    for number in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": number}
        subprocess.run([sys.executable, "-c", WRITE, workload, str(tmp_path / number)], env=environment, check=True)
    here = Workload(20, turns=5, think=LogNormal(9.0, 0.7), eta_noise=0.3, tool_share=0.4, seed=11)
    write_trace(plan_trace(here), tmp_path / "here")
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes() == (tmp_path / "here").read_bytes()


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadgenError, match=r"cannot read trace \S+none\.jsonl: No such file or directory$"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(LoadgenError, match="cannot write trace"):
        write_trace(TRACE, tmp_path / "none" / "trace.jsonl")


def test_scaling_is_a_factor_on_every_time_and_on_nothing_else() -> None:
    (first, *_), *_ = (agent.turns for agent in scaled(TRACE, 0.5))
    assert first == TurnPlan(100, 10, 1.25, 1.75, tool=False)
    assert [agent.arrival_s for agent in scaled(TRACE, 0.5)] == [0.05, 1 / 6]
    assert scaled(TRACE, 1.0) == TRACE


def changed(**fields: Any) -> str:
    """A good line with some of the agent's fields replaced."""
    return json.dumps({"arrival_s": 0.0, "turns": [turn(), LAST_TURN]} | fields)


def turn(**fields: Any) -> dict[str, Any]:
    good = {"new_tokens": 8, "completion_tokens": 4, "think_s": 1.0, "announced_s": None, "tool": False}
    return good | fields


LAST_TURN = turn(think_s=None)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "the line: invalid JSON"),
        ("\xff", "the line: invalid JSON"),
        ("{}", "arrival_s: "),
        (changed(arrival_s=-1.0), "arrival_s: "),
        (changed(arrival_s=float("nan")), "arrival_s: "),
        (changed(rate=1.0), "rate: "),
        (changed(turns=[]), "turns: "),
        (changed(turns=[turn(new_tokens=0), LAST_TURN]), r"turns\.0\.new_tokens: "),
        (changed(turns=[turn(completion_tokens=True), LAST_TURN]), r"turns\.0\.completion_tokens: "),
        (changed(turns=[turn(announced_s=-0.5), LAST_TURN]), r"turns\.0\.announced_s: "),
        (changed(turns=[turn(think_s=None), LAST_TURN]), r"turns\.0\.think_s: must be a number"),
        (changed(turns=[turn(), turn()]), r"turns\.1\.think_s: must be null"),
        (changed(turns=[turn(), turn(think_s=None, announced_s=2.0)]), r"turns\.1\.announced_s: must be null"),
    ],
)
def test_what_is_wrong_is_named_with_line_and_field(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{changed()}\n\n{line}\n", "latin-1")
    with pytest.raises(LoadgenError, match=rf"trace \S+trace\.jsonl, line 3: {complaint}") as refused:
        read_trace(path)
    assert "\n" not in str(refused.value)
