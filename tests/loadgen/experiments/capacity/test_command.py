"""`loadgen capacity` against servers that hold a known number of agents, and against Djinn with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.experiments.capacity.limits import TTFT
from loadgen.experiments.capacity.report import CapacityReport, TargetReport
from tests.loadgen.experiments.capacity.stub import CONTEXT, SYSTEM, Stub, serving_stub
from tests.loadgen.experiments.running import raw_result, result, sessions_on
from tests.loadgen.interrupting import interrupt
from tests.serving import serve

TURNS, TOKENS = 3, 2
LOAD = f"""
    --turns {TURNS} --context {CONTEXT} --resume-tokens 20 --completion-tokens {TOKENS} --system-tokens {SYSTEM}
    --think 0:0 --slo-ttft 0.6 --slo-tpot 5
""".split()
SLOW_S = 0.9


def capacity(output: Path, *arguments: str) -> int:
    return main(["capacity", *LOAD, "--output", str(output), *arguments])


def found(target: TargetReport) -> tuple[int | None, int | None]:
    return target.findings.held, target.findings.failed


def test_the_number_that_a_server_holds_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_stub(Stub(5, SLOW_S)) as five, serving_stub(Stub(99)) as many:
        targets = ("--target", f"five={five}", "--target", f"many={many}")
        assert capacity(tmp_path, *targets, "--least", "2", "--most", "10") == 0
    five_found, many_found = result(tmp_path, CapacityReport).targets
    assert found(five_found) == (5, 6)
    assert found(many_found) == (10, None)
    assert [probe.agents for probe in five_found.findings.probes] == [2, 4, 8, 6, 5]
    failed = [probe for probe in five_found.findings.probes if not probe.held]
    assert [[miss.what for miss in probe.misses] for probe in failed] == [[TTFT], [TTFT]]
    shown = capsys.readouterr()
    assert "five, probe 4, 6 agents (4 held, 8 failed)" in shown.err
    assert "five: 6 agents failed: first token of a resumed turn: p95" in shown.err
    assert "Agents held" in shown.out
    raw_result(tmp_path, CapacityReport, "2 to 10 agents, 3 turns each")


@pytest.mark.long
def test_all_targets_get_the_same_agents_and_each_probe_has_its_own_texts(tmp_path: Path) -> None:
    with serving_stub(Stub(3, SLOW_S)) as three, serving_stub(Stub(99)) as many:
        assert capacity(tmp_path, "--target", f"a={three}", "--target", f"b={many}", "--most", "4") == 0
    three_found, many_found = (
        {probe.agents: probe for probe in t.findings.probes} for t in result(tmp_path, CapacityReport).targets
    )
    for agents in (1, 2, 4):
        one, other = three_found[agents], many_found[agents]
        assert (one.trace_sha256, one.prompts_sha256) == (other.trace_sha256, other.prompts_sha256)
    assert len({probe.prompts_sha256 for probe in three_found.values()}) == 4


@pytest.mark.long
def test_a_probe_that_can_only_fail_ends_early(tmp_path: Path) -> None:
    with serving_stub(Stub(0, SLOW_S)) as none:
        assert capacity(tmp_path, "--target", f"none={none}", "--turns", "30", "--least", "4", "--most", "4") == 1
    (target,) = result(tmp_path, CapacityReport).targets
    (probe,) = target.findings.probes
    assert found(target) == (None, 4)
    assert probe.ended_early
    assert probe.summary.turns_completed < probe.summary.turns_planned / 2
    assert not probe.run.interrupted
    assert result(tmp_path, CapacityReport).interrupted is False


def test_a_number_with_errors_is_not_held(tmp_path: Path) -> None:
    with serving_stub(Stub(2, status=429)) as two:
        assert capacity(tmp_path, "--target", f"two={two}", "--most", "4") == 0
    (target,) = result(tmp_path, CapacityReport).targets
    assert found(target) == (2, 3)
    failed = next(probe for probe in target.findings.probes if probe.agents == 3)
    assert failed.summary.turn_errors.keys() == {"RateLimited"}


def test_a_server_with_a_tiny_model(tmp_path: Path) -> None:
    """It opens two sessions at most: three agents are refused."""
    with serve(max_sessions=2) as url:
        code = capacity(tmp_path, "--target", f"djinn={url}", "--slo-ttft", "60", "--slo-tpot", "60", "--most", "4")
        assert sessions_on(url) == []
    (target,) = result(tmp_path, CapacityReport).targets
    assert code == 0
    assert found(target) == (2, 3)
    assert target.findings.probes[1].summary.turns_completed == 2 * TURNS
    assert target.server.protocol == "djinn"


@pytest.mark.long
def test_an_interrupted_search_leaves_its_probes(tmp_path: Path) -> None:
    """The second probe never ends: Ctrl-C comes in it."""
    stub = Stub(1, slow_s=3600)
    with serving_stub(stub) as one:
        command = ["capacity", "--target", f"one={one}", *LOAD, "--output", str(tmp_path)]
        interrupt(command, lambda: len(stub.seen) >= 2 and max(map(len, stub.seen.values())) > 2)
    (target,) = result(tmp_path, CapacityReport).targets
    assert target.findings.interrupted
    assert not target.findings.complete
    assert [(probe.agents, probe.held) for probe in target.findings.probes] == [(1, True)]
