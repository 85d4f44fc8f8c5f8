"""An agent whose requests fail on their way to a real server with a tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from client import AsyncDjinn, ServerError
from loadgen.experiments.cluster import retrying
from loadgen.experiments.cluster.agent import ClusterAgent, LostTurn
from loadgen.experiments.cluster.checking import check_histories, compare
from loadgen.experiments.cluster.findings import Findings
from loadgen.load.turn_clock import TurnClock
from loadgen.load.workload import Signals
from loadgen.targets import TargetSpec
from tests.loadgen.flaky import BUG, CUT, MOVING, REFUSED, UNANSWERED, Flaky
from tests.loadgen.stubs import serving
from tests.serving import serve

PROMPTS = ((40, 41, 42), (43, 44))
TOKENS = 6


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve() as url:
        yield url


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSE_S", 0.0)


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

    async def histories(self) -> tuple[int, ...]:
        """What the server has."""
        assert self.agent.session is not None
        return (await (await self.djinn.sessions.get(self.agent.session.id)).history()).token_ids


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
    async with stage(url) as calm:
        return [await calm.take(), await calm.take()]


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
    expected = await right(url)
    async with stage(url) as one:
        assert [await one.take(), await one.take(*failures)] == expected
        retries = one.findings.retries
        assert (retries.errors, retries.turns, retries.recovered) == (errors, [(0, 1)], recovered)
        assert await one.histories() == one.agent.history == (*PROMPTS[0], *expected[0], *PROMPTS[1], *expected[1])
        compare([one.agent], (tuple(expected),), one.findings)
        assert (one.findings.compared, one.findings.tokens, one.findings.wrong) == (2, 2 * TOKENS, [])


async def test_a_bug_is_not_asked_again_after(url: str) -> None:
    async with stage(url) as one:
        with pytest.raises(ServerError):
            await one.take(BUG)
        assert one.findings.retries.errors == {}


async def test_another_turn_than_the_single_servers_is_found(url: str) -> None:
    expected = await right(url)
    async with stage(url) as one:
        await one.take()
        compare([one.agent], ((expected[1],),), one.findings)
        assert [(wrong.agent, wrong.turn) for wrong in one.findings.wrong] == [(0, 0)]


async def test_a_finished_turn_that_is_gone_is_found_by_the_next_one_that_fails(url: str) -> None:
    async with stage(url) as one:
        await one.take()
        assert one.agent.session is not None
        await (await one.djinn.sessions.get(one.agent.session.id)).rewind(4)
        with pytest.raises(LostTurn):
            await one.take(UNANSWERED)
        assert len(one.findings.lost) == 1


async def test_a_finished_turn_that_is_gone_is_found_at_the_end(url: str) -> None:
    async with stage(url) as one:
        await one.take()
        transport = TargetSpec("direct", url).transport()
        await check_histories(transport, [one.agent], one.findings)
        assert one.findings.lost == []
        assert one.agent.session is not None
        await (await one.djinn.sessions.get(one.agent.session.id)).rewind(4)
        await check_histories(transport, [one.agent], one.findings)
        await transport.close()
        assert [(lost.agent, lost.turn) for lost in one.findings.lost] == [(0, None)]


async def test_an_agent_rests_from_its_signal_until_it_comes_back(url: str) -> None:
    async with stage(url) as one:
        await one.take()
        rests = [one.agent.rests]
        assert await one.agent.leave(5.0) == "io_wait"
        rests.append(one.agent.rests)
        await one.agent.come_back()
        rests.append(one.agent.rests)
        assert rests == [False, True, False]
        session = one.agent.session
        await one.agent.close()
        assert session is not None
        assert (await one.djinn.sessions.get(session.id)).info.state == "idle"
