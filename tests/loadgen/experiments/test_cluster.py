"""`loadgen cluster`: agents whose requests fail on their way, behind owners or a hash, and a run on a real cluster."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from client import AsyncDjinn, AsyncSession
from loadgen.cli import main
from loadgen.experiments.cluster import retrying
from loadgen.experiments.cluster.agent import ClusterAgent, LostTurn
from loadgen.experiments.cluster.checking import check_histories, compare
from loadgen.experiments.cluster.findings import Findings
from loadgen.experiments.cluster.hashing import HashAgents, Ring
from loadgen.experiments.cluster.report import ClusterReport
from loadgen.load.turn_clock import TurnClock
from loadgen.load.workload import Signals
from loadgen.targets import TargetSpec
from loadgen.targets.subject import greedy
from tests.loadgen.experiments.conftest import raw_result, result
from tests.loadgen.stubs import CUT, MOVING, REFUSED, UNANSWERED, Flaky, serving
from tests.serving import serve

PROMPTS = ((40, 41, 42), (43, 44), (45,))
TOKENS = 6


@dataclass
class Stage:
    """An agent, the door that fails, and what was found."""

    agent: ClusterAgent
    door: Flaky
    findings: Findings
    djinn: AsyncDjinn

    async def take(self, *failures: str) -> tuple[int, ...]:
        """The agent's next turn, before which so much fails; returns its tokens."""
        self.door.failures = list(failures)
        clock = TurnClock()
        await self.agent.run_turn(PROMPTS[len(self.agent.turns)], TOKENS, clock)
        assert clock.token_times_s
        return self.agent.turns[-1][1]

    async def session(self) -> AsyncSession:
        """As the server has it."""
        assert self.agent.session is not None
        return await self.djinn.sessions.get(self.agent.session.id)


@asynccontextmanager
async def stage(url: str) -> AsyncIterator[Stage]:
    door, findings = Flaky(url), Findings()
    with serving(door) as address:
        agent = ClusterAgent(0, TargetSpec("flaky", address), Signals.ETA, findings)
        async with AsyncDjinn(url) as djinn:
            yield Stage(agent, door, findings, djinn)
        await agent.close()


async def right(url: str) -> list[tuple[int, ...]]:
    """What the server says when nothing fails."""
    async with AsyncDjinn(url) as djinn, await djinn.sessions.create() as session:
        return [(await session.generate(**greedy(prompt, TOKENS))).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("failures", "errors", "recovered"),
    [
        ([REFUSED, REFUSED, MOVING], {"replica_away": 2, "moving": 1}, 0),
        ([UNANSWERED], {"replica_lost": 1}, 1),
        ([CUT], {"replica_lost": 1}, 0),
        ([REFUSED, CUT, UNANSWERED], {"replica_away": 1, "replica_lost": 2}, 1),
    ],
)
async def test_a_turn_that_fails_on_its_way_is_taken_exactly_once(
    url: str, failures: list[str], errors: dict[str, int], recovered: int
) -> None:
    expected = (await right(url))[:2]
    async with stage(url) as one:
        assert [await one.take(), await one.take(*failures)] == expected
        retries = one.findings.retries
        assert (retries.errors, retries.turns, retries.recovered) == (errors, [(0, 1)], recovered)
        history = (await (await one.session()).history()).token_ids
        assert history == one.agent.history == (*PROMPTS[0], *expected[0], *PROMPTS[1], *expected[1])
        compare([one.agent], (tuple(expected),), one.findings)
        assert (one.findings.compared, one.findings.tokens, one.findings.wrong) == (2, 2 * TOKENS, [])


async def test_a_finished_turn_that_is_gone_is_found_at_the_end_or_by_the_next_one_that_fails(url: str) -> None:
    async with stage(url) as one:
        await one.take()
        transport = TargetSpec("direct", url).transport()
        await check_histories(transport, [one.agent], one.findings)
        assert one.findings.lost == []
        await (await one.session()).rewind(4)
        await check_histories(transport, [one.agent], one.findings)
        await transport.close()
        assert [(lost.agent, lost.turn) for lost in one.findings.lost] == [(0, None)]
        with pytest.raises(LostTurn):
            await one.take(UNANSWERED)
        assert len(one.findings.lost) == 2


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSE_S", 0.0)


@pytest.mark.parametrize(
    "failure", [CUT, *(pytest.param(each, marks=pytest.mark.long) for each in (REFUSED, UNANSWERED))]
)
async def test_another_replica_gets_the_whole_history(url: str, failure: str) -> None:
    findings, recomputed = Findings(), []
    with serve() as another:
        doors = Flaky(url), Flaky(another)
        with serving(doors[0]) as one, serving(doors[1]) as other:
            agent = HashAgents({"a": one, "b": other}, 60.0, Signals.ETA, findings).new_agent()
            first = doors["ab".index(Ring("ab").order("agent 0")[0])]
            for number, prompt in enumerate(PROMPTS):
                first.failures = [failure] if number == 1 else []
                recomputed.append((await agent.run_turn(prompt, TOKENS, TurnClock())).recomputed_tokens)
            await agent.close()
    assert recomputed[:2] == [0, len(PROMPTS[0]) + TOKENS]
    assert [made for _, made in agent.turns] == await right(url)
    assert findings.retries.turns == [(0, 1)]
    assert findings.cold == 2  # the first one lacks the turn that it refused; or all, if the server's cache is unknown


AGENTS, TURNS = 6, 5
LOAD = ["--agents", f"{AGENTS}", "--turns", f"{TURNS}", "--think", "1:2", "--rate", "6", "--context", "96"]
LENGTHS = ["--resume-tokens", "16", "--completion-tokens", "16", "--system-tokens", "32"]
DONE = ["--replicas", "2", "--routers", "owner", "--moves-per-second", "4", "--kill-every", "3", "--kills", "1"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_cluster_whose_replica_is_killed_says_what_a_single_server_says(tmp_path: Path) -> None:
    """Two replicas, one of which is killed while sessions move."""
    assert main(["cluster", *LOAD, *LENGTHS, *DONE, "--output", str(tmp_path)]) == 0
    assert result(tmp_path, ClusterReport).succeeded
    headings = ("By number of replicas", "What was done to replicas")
    (size,) = raw_result(tmp_path, ClusterReport, *headings)["sizes"]
    findings = size["findings"]
    assert findings["wrong"] == []
    assert findings["compared"] == size["summary"]["turns_completed"] == AGENTS * TURNS
    assert [fault["kind"] for fault in findings["faults"]] == ["kill"]
    assert (findings["lost"], findings["failures"], findings["owners"]) == ([], [], {"1": AGENTS})
    assert findings["moves"]
    assert all(move["bytes"] > 0 for move in findings["moves"])
    assert findings["routing"]["owner"] > 0
