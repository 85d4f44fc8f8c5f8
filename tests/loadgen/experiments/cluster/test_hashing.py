"""Agents behind a hash: where they go, and what they bring along."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client import AsyncDjinn, ServerError
from loadgen.experiments.cluster import retrying
from loadgen.experiments.cluster.findings import Findings
from loadgen.experiments.cluster.hashing import HashAgent, HashAgents, Ring
from loadgen.load.turn_clock import TurnClock
from loadgen.load.workload import Signals
from loadgen.targets.subject import greedy
from tests.loadgen.flaky import BUG, CUT, REFUSED, UNANSWERED, Flaky
from tests.loadgen.stubs import serving
from tests.serving import serve

PROMPTS = ((40, 41, 42), (43, 44), (45,))
TOKENS = 6
NAMES = st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=2, max_size=6, unique=True)


@given(NAMES, st.text(max_size=8))
def test_a_name_belongs_to_every_replica_in_some_order(names: list[str], key: str) -> None:
    assert sorted(Ring(names).order(key)) == sorted(names)


@given(NAMES, st.text(max_size=8), st.data())
def test_who_goes_takes_only_its_own_names_along(names: list[str], key: str, data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(names))
    left = [name for name in Ring(names).order(key) if name != gone]
    assert Ring([name for name in names if name != gone]).order(key) == left


def test_names_are_shared_out_evenly() -> None:
    ring = Ring("abcd")
    first = Counter(ring.order(f"agent {number}")[0] for number in range(4_000))
    assert all(600 < count < 1_400 for count in first.values())


@dataclass
class Stage:
    """An agent between two servers: `first` is the one that its name belongs to."""

    agent: HashAgent
    first: Flaky
    second: Flaky
    findings: Findings

    async def take(self) -> tuple[tuple[int, ...], int | None]:
        """The agent's next turn; returns its tokens, and how many were computed again."""
        clock = TurnClock()
        cost = await self.agent.run_turn(PROMPTS[len(self.agent.turns)], TOKENS, clock)
        assert clock.token_times_s
        return self.agent.turns[-1][1], cost.recomputed_tokens


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, str]]:
    with serve() as one, serve() as other:
        yield one, other


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSE_S", 0.0)


@asynccontextmanager
async def stage(urls: tuple[str, str]) -> AsyncIterator[Stage]:
    doors, findings = [Flaky(url) for url in urls], Findings()
    with serving(doors[0]) as one, serving(doors[1]) as other:
        agents = HashAgents({"a": one, "b": other}, 60.0, Signals.ETA, findings)
        agent = agents.new_agent()
        if Ring("ab").order("agent 0")[0] == "b":
            doors.reverse()
        yield Stage(agent, doors[0], doors[1], findings)
        await agent.close()


async def right(urls: tuple[str, str]) -> list[tuple[int, ...]]:
    """What one server says to all turns."""
    async with AsyncDjinn(urls[0]) as djinn, await djinn.sessions.create() as session:
        return [(await session.generate(**greedy(prompt, TOKENS))).token_ids for prompt in PROMPTS]


async def test_a_session_stays_where_it_is_while_its_replica_is_there(urls: tuple[str, str]) -> None:
    async with stage(urls) as calm:
        told = [await calm.take() for _ in PROMPTS]
    assert [made for made, _ in told] == await right(urls)
    assert [again for _, again in told] == [0, 0, 0]
    assert calm.findings.cold == 0


@pytest.mark.parametrize("failure", [REFUSED, UNANSWERED, CUT])
async def test_another_replica_gets_the_whole_history(urls: tuple[str, str], failure: str) -> None:
    async with stage(urls) as bad:
        told = [await bad.take()]
        bad.first.failures = [failure]
        told.append(await bad.take())
        history = len(PROMPTS[0]) + TOKENS
        assert (told[1][1], bad.findings.cold) == (history, 1)
        assert bad.findings.retries.turns == [(0, 1)]
        told.append(await bad.take())
    assert [made for made, _ in told] == await right(urls)
    assert bad.findings.cold == 2  # the first one lacks the turn that it refused; or all, if nobody knows what it has


async def test_a_session_that_is_gone_is_opened_again_where_it_was(urls: tuple[str, str]) -> None:
    async with stage(urls) as bad:
        told = [await bad.take()]
        async with AsyncDjinn(bad.first.url) as djinn:
            async for session in djinn.sessions.list():
                await session.close()
        assert await bad.agent.leave(5.0) is None
        told.append(await bad.take())
    assert [made for made, _ in told] == (await right(urls))[:2]
    assert bad.findings.cold == 1
    assert bad.findings.retries.errors == {"not_found": 2}


async def test_other_errors_are_not_hidden(urls: tuple[str, str]) -> None:
    async with stage(urls) as bad:
        bad.first.failures = [BUG]
        with pytest.raises(ServerError):
            await bad.take()
