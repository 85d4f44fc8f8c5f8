"""The command from a file of costs to its page, and costs of a real server."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.experiments.simulate.measuring import calibrating, probing
from loadgen.experiments.simulate.measuring.calibrating import Calibration
from loadgen.experiments.simulate.measuring.validating import DRAWS
from loadgen.experiments.simulate.plan import ClusterPlan
from loadgen.experiments.simulate.report import SimulateReport
from loadgen.load.workload import Workload
from loadgen.results.files import write_result
from loadgen.results.inputs import Server
from loadgen.results.origin import machine
from tests.loadgen.experiments.running import raw_result, result
from tests.loadgen.experiments.simulate.building import costs
from tests.serving import serve

SMALL = ("--agents", "5", "--rate", "0.5", "--turns", "2", "--think", "1:9", "--seed", "4")


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A result with costs."""
    report = SimulateReport(
        seed=0,
        workload=Workload(),
        plan=ClusterPlan(),
        calibration=Calibration(costs(), 32, 5),
        calibrated_on=machine(),
        server=Server("djinn", "http://127.0.0.1:1", "djinn", None),
        validations=(),
        verdicts=(),
        outcomes=(),
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    return write_result(report, tmp_path / "costs.json")


def test_a_cluster_is_simulated_with_known_costs(
    known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    chosen = ("--replicas", "3,6", "--event", "zone@3", "--event", "rolling:2@10", "--output", str(out))
    assert main(["simulate", "--costs", str(known), *SMALL, *chosen]) == 0
    assert result(out, SimulateReport).calibration.costs == costs()
    outcomes = raw_result(out, SimulateReport, "Assumed, and measured nowhere", "zone:3@3, rolling:2@10")["outcomes"]
    assert [(each["replicas"], each["policy"]) for each in outcomes] == [
        (size, policy) for size in (3, 6) for policy in ("owner", "hash", "shortest")
    ]
    assert [each["turns"] for each in outcomes] == [30] * 3 + [60] * 3
    assert "Simulated: directory" in capsys.readouterr().out


@pytest.mark.long
def test_rates_are_compared(known: Path, tmp_path: Path) -> None:
    chosen = ("--replicas", "2", "--rates", "0.5,50", "--agents", "40", "--policy", "owner")
    assert main(["simulate", "--costs", str(known), *SMALL, *chosen, "--output", str(tmp_path / "out")]) == 0
    slow, fast = raw_result(tmp_path / "out", SimulateReport)["outcomes"]
    assert (slow["rate"], fast["rate"]) == (0.5, 50.0)
    assert slow["ttft_resumed_s"]["p99"] < fast["ttft_resumed_s"]["p99"]


def test_nothing_to_do_is_said(known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--costs", str(known), "--output", str(tmp_path / "out")]) == 2
    assert "nothing to do" in capsys.readouterr().err


@pytest.mark.long
def test_a_real_server_is_measured_and_its_turns_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model takes no time: the errors are those of its surroundings, and have no limit here."""
    for name, few in (("ROWS", (1, 2)), ("PROMPTS", (16, 64))):
        monkeypatch.setattr(calibrating, name, few)
    for name in ("REPEATS", "DECODES", "DECODED", "MOVED"):
        monkeypatch.setattr(probing, name, 1)
    load = ("--context", "48", "--resume-tokens", "16", "--completion-tokens", "64", "--system-tokens", "16")
    out = tmp_path / "out"
    with serve() as url:
        target = ("--target", f"djinn={url}", "--kv", "4x512", "--validate", "1", "--replicas", "2")
        main(["simulate", *target, *SMALL, *load, "--time-scale", "0.05", "--output", str(out)])

    found = raw_result(out, SimulateReport)
    points = found["calibration"]["costs"]["decode_s"]
    assert [rows for rows, _ in points] == [1, 2]
    assert all(seconds > 0 for _, seconds in points)
    assert [each["seed"] for each in found["validations"]] == [1, None]
    pairs = found["validations"][0]["pairs"]
    assert all(pair["simulated"]["count"] == DRAWS * pair["measured"]["count"] for pair in pairs.values())
    assert len(found["verdicts"]) == 12
