"""`loadgen simulate`: a cluster whose engine is held against queueing theory, from a file of costs to its page."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from loadgen.cli import main
from loadgen.experiments.simulate.costs import Costs, Points, Samples
from loadgen.experiments.simulate.measuring import calibrating, probing
from loadgen.experiments.simulate.measuring.calibrating import Calibration
from loadgen.experiments.simulate.measuring.validating import DRAWS
from loadgen.experiments.simulate.plan import ClusterPlan, Event, Policy
from loadgen.experiments.simulate.population import population
from loadgen.experiments.simulate.report import SimulateReport
from loadgen.experiments.simulate.world.simulation import simulate
from loadgen.experiments.simulate.world.tally import Tally
from loadgen.load.think import Uniform
from loadgen.load.trace import AgentPlan, TurnPlan
from loadgen.load.workload import Signals, Workload
from loadgen.results.files import write_result
from loadgen.results.inputs import Server
from loadgen.results.origin import machine
from tests.loadgen.experiments.conftest import raw_result, result
from tests.serving import serve

DECODE: Points = ((1, 0.02), (8, 0.04))
ONE_EACH: Samples = ((1, (1.0,)),)
PROMPT: Points = ((1, 0.02), (512, 0.5))


def costs(decode_s: Points = DECODE, prompt_s: Points = PROMPT, first_byte_s: float = 0.0) -> Costs:
    """A server whose KV moves at 1 GB/s, 10 kB of each token."""
    return Costs(decode_s, ONE_EACH, prompt_s, first_byte_s, 0.0, 10_000, 1e9, 1e9, 1e9, 1e9)


def agent(arrival_s: float, thinks: Sequence[float] = (), new: int = 100) -> AgentPlan:
    """An agent with a turn more than it thinks, which it announces."""
    turns = [TurnPlan(new, 10, think_s, think_s, False) for think_s in thinks]
    return AgentPlan(arrival_s, (*turns, TurnPlan(new, 10, None, None, False)))


SINGLE = Workload(agents=30_000, turns=1, system_tokens=0, seed=1)
UTILIZATION = 0.7
TOLERANCE = 0.05


def test_prompts_wait_as_in_an_m_g_1_queue() -> None:
    """Pollaczek and Khinchine: the mean wait is rho * s / (2 * (1 - rho)), times the mean square of the lengths."""
    service_s, ratios = 0.5, (0.25, 0.75, 1.0, 2.0)
    load = replace(SINGLE, rate=UTILIZATION / service_s, context=100, completion_tokens=1)
    plan = ClusterPlan(device_tokens=10**9, step_tokens=100, shared_tokens=100, rows=100, front_s=0.0)
    drawn = replace(costs(((1, 0.0),), ((1, 0.0), (100, service_s))), prompt_ratios=((100, ratios),))
    done = simulate(plan, Policy.OWNER, drawn, population(load, 1))
    wait_s = UTILIZATION * service_s * fmean(ratio**2 for ratio in ratios) / (2 * (1 - UTILIZATION))
    assert fmean(done.tally.ttft_s) == pytest.approx(service_s + wait_s, rel=TOLERANCE)


def test_turns_that_decode_together_share_the_processor() -> None:
    """Kleinrock: where a step takes as long as its rows together, the mean time is s / (1 - rho)."""
    token_s, tokens = 0.01, 100
    service_s = token_s * tokens
    load = replace(SINGLE, rate=UTILIZATION / service_s, context=1, completion_tokens=tokens)
    plan = ClusterPlan(device_tokens=10**9, step_tokens=1000, shared_tokens=1000, rows=1000, front_s=0.0)
    made = costs(((1, token_s), (2, 2 * token_s)), ((1, 0.0),))
    done = simulate(plan, Policy.OWNER, made, population(load, 1))
    took = [ttft + (tokens - 1) * tpot for ttft, tpot in zip(done.tally.ttft_s, done.tally.tpot_s, strict=True)]
    assert fmean(took) == pytest.approx(service_s / (1 - UTILIZATION), rel=TOLERANCE)


def run(agents: list[AgentPlan], signals: Signals = Signals.ETA, made: Costs | None = None, **sizes: Any) -> Tally:
    return simulate(ClusterPlan(front_s=0.0, **sizes), Policy.OWNER, made or costs(), agents, signals).tally


def test_kv_that_is_announced_is_back_when_its_turn_comes() -> None:
    """A GB of KV moves in ten seconds: who says nothing of the return waits for them."""
    slow = Costs(((1, 0.02),), ONE_EACH, ((1, 0.02), (512, 0.02)), 0.0, 0.0, 10**7, 1e8, 1e8)
    told, late = (
        run([agent(0.0, [60.0])], signals, slow, device_tokens=2000).ttft_s[1]
        for signals in (Signals.ETA, Signals.READY)
    )
    assert told == pytest.approx(0.02, abs=0.02)
    assert late > 5.0


def test_a_full_device_has_turns_wait_and_kv_without_room_in_any_tier_is_recomputed() -> None:
    tally = run([agent(0.1 * n, [5.0, 5.0]) for n in range(20)], device_tokens=400)
    assert (tally.turns, tally.recomputed_tokens) == (60, 0)
    tally = run([agent(0.1 * n, [30.0]) for n in range(8)], device_tokens=400, host_tokens=200, disk_tokens=0)
    assert tally.traffic.dropped > 0 < tally.recomputed_tokens


LOAD = Workload(
    agents=60, rate=0.5, context=200, turns=4, think=Uniform(2.0, 20.0), completion_tokens=20, eta_noise=0.5, seed=3
)
EVENTS = ("zone@30", "replica@10", "rolling@20", "rolling:2@20", "restarts@20", "add:3@30", "balance@40")
TIGHT = {"device_tokens": 1200, "host_tokens": 1500, "disk_tokens": 3000}


def cluster(policy: Policy, *events: str, **sizes: Any) -> Tally:
    plan = ClusterPlan(replicas=6, events=tuple(map(Event.parse, events)), down_s=5.0, **sizes)
    return simulate(plan, policy, costs(), population(LOAD, 6), LOAD.signals, LOAD.system_tokens).tally


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("sizes", [{}, TIGHT])
def test_every_turn_ends_once_whatever_happens(policy: Policy, sizes: dict[str, Any]) -> None:
    tally = cluster(policy, *EVENTS, **sizes)
    assert (tally.sessions, tally.turns) == (60 * 6, 4 * 60 * 6)
    assert sorted(tally.number) == sorted([0, 1, 2, 3] * 60 * 6)
    assert min(tally.ttft_s) > 0
    assert tally.generated_tokens == 20 * tally.turns


@pytest.mark.parametrize(("host_tokens", "again"), [(0, 0), (10_000, 3 * 109)])
def test_a_lost_zone_costs_the_histories_that_were_not_on_disk(host_tokens: int, again: int) -> None:
    """Nine agents on three replicas think while one of these dies. All KV is on disk, or all of it in memory."""
    plan = ClusterPlan(replicas=3, host_tokens=host_tokens, down_s=5.0, events=(Event.parse("zone:3@50"),))
    tally = simulate(plan, Policy.OWNER, costs(), [agent(0.01 * n, [100.0]) for n in range(9)]).tally
    assert (tally.turns, tally.recomputed_tokens, tally.refused) == (18, again, 0)


def test_updates_and_new_replicas_cost_histories_where_a_hash_decides_and_none_where_sessions_have_owners() -> None:
    """A rolling update moves sessions; where replicas restart with them, turns are refused meanwhile."""
    moved, waited = (cluster(Policy.OWNER, event) for event in ("rolling@20", "restarts@20"))
    hashed = cluster(Policy.HASH, "rolling@20")
    assert moved.moves > 0 == moved.recomputed_tokens == moved.refused
    assert sum(moved.puts.values()) == moved.moves
    assert waited.refused > 0 == waited.moves == waited.recomputed_tokens
    assert hashed.recomputed_tokens > 0 == hashed.refused == hashed.moves
    owner, hashed = (cluster(policy, "add:6@40") for policy in (Policy.OWNER, Policy.HASH))
    assert owner.recomputed_tokens == 0 < hashed.recomputed_tokens


SMALL = ("--agents", "5", "--rate", "0.5", "--turns", "2", "--think", "1:9", "--seed", "4")


def test_a_cluster_is_simulated_with_known_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of an earlier result."""
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
    known = write_result(report, tmp_path / "costs.json")
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
    assert [(rows, seconds > 0) for rows, seconds in points] == [(1, True), (2, True)]
    assert [each["seed"] for each in found["validations"]] == [1, None]
    pairs = found["validations"][0]["pairs"]
    assert all(pair["simulated"]["count"] == DRAWS * pair["measured"]["count"] for pair in pairs.values())
    assert len(found["verdicts"]) == 12
