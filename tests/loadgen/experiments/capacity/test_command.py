"""`loadgen capacity` against servers that hold a known number of agents, and against Djinn with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

import client
from loadgen.cli import main
from loadgen.experiments.capacity.limits import TTFT
from loadgen.experiments.capacity.report import CapacityReport, TargetReport
from loadgen.results.files import read_result
from tests.loadgen.experiments.capacity.stub import CONTEXT, SYSTEM, Stub, serving_stub
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


def result(folder: Path) -> CapacityReport:
    (path,) = folder.glob("capacity-*.json")
    return read_result(path, CapacityReport)


def found(target: TargetReport) -> tuple[int | None, int | None]:
    return target.findings.held, target.findings.failed


def test_the_number_that_a_server_holds_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_stub(Stub(5, SLOW_S)) as five, serving_stub(Stub(99)) as many:
        targets = ("--target", f"five={five}", "--target", f"many={many}")
        assert capacity(tmp_path, *targets, "--least", "2", "--most", "10") == 0

    five_found, many_found = result(tmp_path).targets
    assert found(five_found) == (5, 6)
    assert found(many_found) == (10, None)
    assert [probe.agents for probe in five_found.findings.probes] == [2, 4, 8, 6, 5]
    failed = [probe for probe in five_found.findings.probes if not probe.held]
    assert [[miss.what for miss in probe.misses] for probe in failed] == [[TTFT], [TTFT]]
    shown = capsys.readouterr()
    assert "five, probe 4, 6 agents (4 held, 8 failed)" in shown.err
    assert "five: 6 agents failed: first token of a resumed turn: p95" in shown.err
    assert "Agents held" in shown.out
    assert len(list(tmp_path.glob("capacity-*.png"))) == 2
    assert (next(tmp_path.glob("capacity-*.html"))).read_text().count("<svg") == 2


@pytest.mark.long
def test_all_targets_get_the_same_agents_and_each_probe_has_its_own_texts(tmp_path: Path) -> None:
    with serving_stub(Stub(3, SLOW_S)) as three, serving_stub(Stub(99)) as many:
        assert capacity(tmp_path, "--target", f"a={three}", "--target", f"b={many}", "--most", "4") == 0

    three_found, many_found = ({probe.agents: probe for probe in t.findings.probes} for t in result(tmp_path).targets)
    for agents in (1, 2, 4):
        one, other = three_found[agents], many_found[agents]
        assert (one.trace_sha256, one.prompts_sha256) == (other.trace_sha256, other.prompts_sha256)
    assert len({probe.prompts_sha256 for probe in three_found.values()}) == 4


@pytest.mark.long
def test_a_probe_that_can_only_fail_ends_early(tmp_path: Path) -> None:
    with serving_stub(Stub(0, SLOW_S)) as none:
        assert capacity(tmp_path, "--target", f"none={none}", "--turns", "30", "--least", "4", "--most", "4") == 1

    (target,) = result(tmp_path).targets
    (probe,) = target.findings.probes
    assert found(target) == (None, 4)
    assert probe.ended_early
    assert probe.summary.turns_completed < probe.summary.turns_planned / 2
    assert not probe.run.interrupted
    assert result(tmp_path).interrupted is False


def test_a_number_with_errors_is_not_held(tmp_path: Path) -> None:
    with serving_stub(Stub(2, status=429)) as two:
        assert capacity(tmp_path, "--target", f"two={two}", "--most", "4") == 0

    (target,) = result(tmp_path).targets
    assert found(target) == (2, 3)
    failed = next(probe for probe in target.findings.probes if probe.agents == 3)
    assert failed.summary.turn_errors.keys() == {"RateLimited"}


def test_a_server_with_a_tiny_model(tmp_path: Path) -> None:
    """It opens two sessions at most: three agents are refused."""
    with serve(max_sessions=2) as url:
        code = capacity(tmp_path, "--target", f"djinn={url}", "--slo-ttft", "60", "--slo-tpot", "60", "--most", "4")
        with client.Djinn(url, timeout=30) as djinn:
            assert list(djinn.sessions.list()) == []

    (target,) = result(tmp_path).targets
    assert code == 0
    assert found(target) == (2, 3)
    assert target.findings.probes[1].summary.turns_completed == 2 * TURNS
    assert target.server.protocol == "djinn"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--least", "0"], "--least must be at least 1, not 0"),
        (["--most", "0"], "--most must be at least --least, which is 1, not 0"),
        (["--slo-tpot", "nan"], "--slo-tpot must be above 0 and finite, in seconds, not nan"),
        (["--turns", "1"], "--turns must be at least 2"),
    ],
)
def test_what_cannot_start_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert capacity(tmp_path, "--target", "a=http://127.0.0.1:9", *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_the_search_decides_is_no_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for decided in ("--agents", "--rate", "--trace"):
        with pytest.raises(SystemExit):
            capacity(tmp_path, "--target", "a=http://127.0.0.1:9", decided, "4")
        assert f"unknown flag {decided}" in capsys.readouterr().err


@pytest.mark.long
def test_an_interrupted_search_leaves_its_probes(tmp_path: Path) -> None:
    """The second probe never ends: Ctrl-C comes in it."""
    stub = Stub(1, slow_s=3600)
    with serving_stub(stub) as one:
        command = ["capacity", "--target", f"one={one}", *LOAD, "--output", str(tmp_path)]
        interrupt(command, lambda: len(stub.seen) >= 2 and max(map(len, stub.seen.values())) > 2)
    (target,) = result(tmp_path).targets
    assert target.findings.interrupted
    assert not target.findings.complete
    assert [(probe.agents, probe.held) for probe in target.findings.probes] == [(1, True)]
