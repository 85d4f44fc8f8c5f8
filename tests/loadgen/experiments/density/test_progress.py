"""What is said of a run while it goes."""

from __future__ import annotations

import time
from io import StringIO

import pytest
from rich.console import Console, Group, RenderableType

from loadgen.experiments.density import live
from loadgen.experiments.density.live import LiveView, watching
from loadgen.experiments.density.progress import Follower, Progress
from loadgen.experiments.density.wording import bar, block, summary_line, told
from loadgen.load.records import Failure, Run, Sample, TurnCost, TurnRecord
from loadgen.load.trace import AgentPlan, TurnPlan
from loadgen.load.turn_clock import TurnClock

THINKS = TurnPlan(10, 5, 4.0, None, False)
LAST = TurnPlan(10, 5, None, None, False)
TRACE = (AgentPlan(0.0, (THINKS, LAST)), AgentPlan(1.0, (THINKS, LAST)), AgentPlan(20.0, (LAST,)))


def turn(agent: int, number: int, sent_s: float, ttft_s: float = 0.5) -> TurnRecord:
    """A turn of 5 tokens that takes a second."""
    return TurnRecord(agent, number, sent_s, sent_s, (ttft_s,), 1.0, TurnCost(10, 5, 0, 0))


def sample(**sessions: int) -> Sample:
    return Sample(0.0, sessions, {}, None, None, None, None, None)


def test_agents_arrive_generate_think_and_are_done() -> None:
    run, follower = Run(), Follower(TRACE)
    states = []
    for now_s, new in (
        (0.5, ()),
        (1.5, (turn(0, 0, 0.0),)),
        (3.0, (turn(1, 0, 1.0),)),
        (5.5, ()),
        (21.0, (turn(0, 1, 5.0),)),
    ):
        run.turns += new
        seen = follower.look(run, now_s)
        states.append((seen.thinking, seen.generating, seen.done))
    assert states == [(0, 1, 0), (1, 1, 0), (2, 0, 0), (1, 1, 0), (0, 2, 1)]


def test_a_failed_turn_is_its_agents_last() -> None:
    run = Run(failures=[Failure(0, 0, 0.4, "Timeout", ""), Failure(1, None, 0.4, "Timeout", "")])
    seen = Follower(TRACE).look(run, 2.0)
    assert (seen.failed, seen.done, seen.generating) == (1, 1, 1)


def test_figures_so_far() -> None:
    run = Run(
        turns=[turn(0, 0, 0.0, 9.0), turn(0, 1, 5.0, 0.2), turn(1, 1, 6.0, 0.4)],
        samples=[sample(device=2, to_host=1, to_device=2)],
    )
    seen = Follower(TRACE).look(run, 10.0)
    assert (seen.completed, seen.planned) == (3, 5)
    assert seen.resumed_p50_s == pytest.approx(0.3)
    assert seen.resumed_p99_s == pytest.approx(0.398)
    assert seen.tokens_per_s == pytest.approx(1.5)
    assert seen.sessions == {"device": 2, "host": 0, "disk": 0, "moving": 3}


def test_time_left_is_that_of_the_last_agent() -> None:
    run, follower = Run(), Follower(TRACE)
    assert follower.look(run, 0.5).left_s is None
    run.turns.append(turn(0, 0, 0.0))
    assert follower.look(run, 1.5).left_s == pytest.approx(20 + 1 - 1.5)


def test_what_is_read_piece_by_piece_is_read_once() -> None:
    run, follower = Run(), Follower(TRACE)
    for record in (turn(0, 0, 0.0), turn(1, 0, 1.0), turn(0, 1, 5.0)):
        run.turns.append(record)
        seen = follower.look(run, 6.5)
    assert seen == Follower(TRACE).look(run, 6.5)


def printed(*parts: RenderableType, width: int = 80) -> str:
    console = Console(width=width, file=StringIO(), record=True, legacy_windows=False)
    console.print(Group(*parts))
    return console.export_text()


def test_a_block_fits_a_terminal_of_80_columns() -> None:
    run = Run(turns=[turn(0, 0, 0.0), turn(0, 1, 5.0)], samples=[sample(device=24, host=41, disk=1)])
    lines = printed(*block("djinn, run 1 of 3", Follower(TRACE).look(run, 70.0))).splitlines()
    assert len(lines) <= 5
    text = "\n".join(lines)
    for words in ("2 of 5 turns, 0 failed", "1:10", "2 generating", "p50 500 ms, p99 500 ms", "device", "41"):
        assert words in text


def test_targets_before_and_after_their_turn() -> None:
    seen = Follower(TRACE).look(Run(turns=[turn(0, 0, 0.0)]), 2.0)
    assert "waits" in printed(summary_line("[red]", None))
    assert "[red]" in printed(summary_line("[red]", None))
    assert "1 of 5 turns" in printed(summary_line("djinn", seen))


@pytest.mark.parametrize(("part", "shown"), [(0, "····"), (1, "█···"), (1.5, "█▌··"), (4, "████"), (9, "████")])
def test_bars_are_filled_to_an_eighth(part: float, shown: str) -> None:
    assert bar(part, 4, 4) == shown


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "TELL_EVERY_S", 0.01)
    console = Console(file=StringIO(), record=True, width=80)
    run = Run(turns=[turn(0, 0, 0.0)])
    with watching(console, ["djinn"], TRACE, repeats=2) as view:
        view.begin("djinn", 1).changed(run)
        deadline = time.monotonic() + 10
        while console.export_text(clear=False).count("\n") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    lines = console.export_text().splitlines()
    assert len(lines) >= 3
    assert lines[-1].startswith("djinn, run 2 of 2: 1 of 5 turns, 0 failed; ")


def test_on_a_terminal_every_target_has_its_place() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80)
    with watching(console, ["djinn", "vllm"], TRACE, repeats=1) as view:
        view.begin("djinn", 0).changed(Run(turns=[turn(0, 0, 0.0)]))
        text = printed(view.draw())
    assert "1 of 5 turns" in text
    assert "vllm  waits" in text


def test_a_target_that_is_over_keeps_its_figures() -> None:
    view = LiveView(["djinn", "vllm"], TRACE, repeats=1)
    view.begin("djinn", 0).changed(Run(turns=[turn(0, 0, 0.0)], duration_s=65.0))
    view.draw()
    view.begin("vllm", 0)
    first = printed(view.draw(), width=120).splitlines()[0]
    assert first.startswith("djinn  1 of 5 turns, 0 failed; ")
    assert "1:05" in first


def test_a_line_says_everything() -> None:
    run = Run(turns=[turn(0, 1, 0.0)], samples=[sample(device=3)])
    assert told("djinn", Follower(TRACE).look(run, 10.0)) == (
        "djinn: 1 of 5 turns, 0 failed; 2 of 3 arrived: 0 thinking, 1 generating, 1 done; "
        "resumed TTFT p50 500 ms, p99 500 ms; 5 tokens, 0 tokens/s; "
        "sessions: device 3, host 0, disk 0, moving 0; 0:10, about 0:11 left"
    )


def test_before_its_agents_arrive_a_run_has_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes a minute to start does not make the run look a minute old."""
    clock = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    view = LiveView(["djinn"], TRACE, repeats=1)
    watched = view.begin("djinn", 0)
    assert view.look() == ("djinn", "the server starts")
    clock[0] += 60.0
    watched.changed(Run())
    clock[0] += 2.0
    _, progress = view.look()
    assert isinstance(progress, Progress)
    assert progress.elapsed_s == pytest.approx(2.0)


def test_before_the_first_turn_is_over_it_says_what_happens() -> None:
    view = LiveView(["djinn"], TRACE, repeats=1)
    watched = view.begin("djinn", 0)
    assert printed(view.draw()).strip() == "djinn  the server starts"
    watched.says = "the server warms up"
    assert told(*view.look()) == "djinn: the server warms up"
    clock = TurnClock()
    watched.changed(Run(), {clock})
    clock.tokens()
    clock.tokens()
    line = told(*view.look())
    assert "0 of 5 turns, 0 failed; 1 of 3 arrived: 0 thinking, 1 generating, 0 done; " in line
    assert "2 tokens, " in line
