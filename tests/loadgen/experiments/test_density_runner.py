"""The runner keeps its clock and its books, whatever a server does."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest

import client
from loadgen.experiments.density import runner
from loadgen.experiments.density.runner import Runner
from loadgen.load.prompts import TokenIds
from loadgen.load.records import Run, TurnCost
from loadgen.load.trace import AgentPlan, TurnPlan
from loadgen.load.turn_clock import TurnClock
from loadgen.targets import TargetSpec

COMPLETION = 2
TURN_S = 0.2
SIGNAL_S = 0.05

LATE_S = 0.25
"""How much later than it should a machine may do something on which other things run; never earlier."""


class Server:
    """Takes `TURN_S` for each turn; a new token id can ask it to misbehave. It is its own agent."""

    FAIL, STUTTER, SILENT, HANG, CLOSE_BADLY, DEAF, SLOW_TO_HEAR = range(-7, 0)

    def __init__(self) -> None:
        self.spec = TargetSpec("server", "http://nowhere")
        self.seen: list[TokenIds] = []
        self.asked: list[int] = []
        self.told: list[tuple[str, float | None, float]] = []
        """What agents said between turns, for how long they would be away, and when."""
        self.open = 0

    def new_agent(self) -> ScriptedAgent:
        return ScriptedAgent(self)

    async def prepare(self, tokens: int) -> None:
        raise NotImplementedError

    async def tokenize(self, text: str, special: bool) -> TokenIds:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class ScriptedAgent:
    is_exact = True

    def __init__(self, server: Server) -> None:
        self._server = server
        self._last = 0
        server.open += 1
        self._close_s = 0.03 * server.open  # each is slower to close than the one before

    async def run_turn(self, new_ids: TokenIds, completion_tokens: int, clock: TurnClock) -> TurnCost:
        self._server.seen.append(new_ids)
        self._server.asked.append(completion_tokens)
        (self._last,) = new_ids
        await asyncio.sleep(TURN_S if self._last != Server.HANG else 3600)
        if self._last == Server.FAIL:
            raise client.RateLimited("the queue is full")
        if self._last != Server.SILENT:
            clock.tokens()
        clock.over()
        return TurnCost(1, completion_tokens - (self._last == Server.STUTTER), None, None)

    async def leave(self, away_s: float | None) -> str | None:
        if self._last == Server.DEAF:
            raise client.Conflict("not now")
        if self._last == Server.SLOW_TO_HEAR:
            await asyncio.sleep(3600)
        self._server.told.append(("leave", away_s, time.perf_counter()))
        await asyncio.sleep(SIGNAL_S)
        return "io_wait"

    async def come_back(self) -> str | None:
        self._server.told.append(("come back", 0.0, time.perf_counter()))
        return None

    async def close(self) -> None:
        if self._last == Server.CLOSE_BADLY:
            raise client.NotFound("no such session")
        await asyncio.sleep(self._close_s)
        self._server.open -= 1


def plan(arrival_s: float, *thinks_s: float) -> AgentPlan:
    """An agent that is exact about when it comes back."""
    earlier = (TurnPlan(1, COMPLETION, think_s, think_s, tool=False) for think_s in thinks_s)
    return AgentPlan(arrival_s, (*earlier, TurnPlan(1, COMPLETION, None, None, tool=False)))


async def run(
    server: Server, trace: Sequence[AgentPlan], turns: Sequence[Sequence[int]], turn_timeout_s: float = math.inf
) -> Run:
    prompts = [[(token_id,) for token_id in agent] for agent in turns]
    return await Runner(server, lambda _run, _in_flight: None, turn_timeout_s).execute(tuple(trace), prompts)


@pytest.mark.parametrize(
    ("token_id", "kind"),
    [(Server.FAIL, "RateLimited"), (Server.STUTTER, "WrongTokenCount"), (Server.SILENT, "WrongTokenCount")],
)
async def test_a_failed_turn_ends_its_agent_and_no_other(token_id: int, kind: str) -> None:
    server = Server()
    found = await run(server, 2 * [plan(0.0, 0.0, 0.0)], [[1, token_id, 2], [3, 4, 5]])
    assert [(failure.agent, failure.turn, failure.kind) for failure in found.failures] == [(0, 1, kind)]
    assert sorted((record.agent, record.turn) for record in found.turns) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert (2,) not in server.seen
    assert server.open == 0


async def test_a_conversation_that_cannot_be_closed_is_reported() -> None:
    found = await run(Server(), [plan(0.0)], [[Server.CLOSE_BADLY]])
    assert len(found.turns) == 1
    assert [(failure.agent, failure.turn, failure.kind) for failure in found.failures] == [(0, None, "NotFound")]


async def test_a_server_is_told_of_each_pause_when_it_begins_and_before_it_ends() -> None:
    server = Server()
    started = time.perf_counter()
    found = await run(server, [plan(0.0, 0.8, 0.4)], [[1, 2, 3]])
    assert [what for what, _, _ in server.told] == ["leave", "come back"] * 2
    for for_s, think_s in zip([for_s for _, for_s, _ in server.told[::2]], (0.8, 0.4), strict=True):
        assert for_s is not None
        assert 0 <= think_s - for_s < LATE_S
    for record, (_, _, at) in zip(found.turns[1:], server.told[1::2], strict=True):
        assert 0 <= at - started - (record.due_s - runner.COME_BACK_S) < LATE_S
    assert [(signal.agent, signal.phase) for signal in found.signals] == [(0, "io_wait")] * 2
    assert all(0 <= signal.round_trip_s - SIGNAL_S < LATE_S for signal in found.signals)


async def test_what_an_agent_announces_need_not_be_when_it_comes_back() -> None:
    server = Server()
    turns = [TurnPlan(1, 7, 0.2, 0.9, False), TurnPlan(1, COMPLETION, 0.2, None, True), plan(0.0).turns[0]]
    found = await run(server, [AgentPlan(0.0, tuple(turns))], [[1, 2, 3]])
    (_, announced_s, _), (_, unsaid, _) = server.told[::2]
    assert announced_s is not None
    assert 0 <= 0.9 - announced_s < LATE_S
    assert unsaid is None
    assert server.asked == [7, COMPLETION, COMPLETION]
    assert [record.tool for record in found.turns] == [False, True, False]
    for earlier, later in pairwise(found.turns):
        assert later.due_s == pytest.approx(earlier.sent_s + earlier.latency_s + 0.2, abs=1e-6)


async def test_a_turn_that_takes_too_long_has_failed() -> None:
    server = Server()
    found = await run(server, 2 * [plan(0.0, 0.0)], [[1, Server.HANG], [2, 3]], turn_timeout_s=2 * TURN_S)
    assert [(failure.agent, failure.turn, failure.kind) for failure in found.failures] == [(0, 1, "Timeout")]
    assert found.failures[0].message == "no answer within 0.4 s"
    assert len(found.turns) == 3
    assert server.open == 0


@pytest.mark.parametrize(("token_id", "kind"), [(Server.SLOW_TO_HEAR, "Timeout"), (Server.DEAF, "Conflict")])
async def test_a_signal_that_fails_is_reported_and_its_agent_goes_on(token_id: int, kind: str) -> None:
    found = await run(Server(), [plan(0.0, 0.0)], [[token_id, 1]], turn_timeout_s=2 * TURN_S)
    assert [(failure.turn, failure.kind) for failure in found.failures] == [(None, kind)]
    assert len(found.turns) == 2
    assert found.signals == []


async def test_cancelled_it_gives_what_it_has_and_closes_what_is_open() -> None:
    server = Server()
    turns = [[1, Server.HANG], [2, Server.HANG], [3, Server.HANG], [4, 5]]
    task = asyncio.create_task(run(server, 4 * [plan(0.0, 0.0)], turns))
    await asyncio.sleep(3.5 * TURN_S)
    task.cancel()
    found = await task
    assert found.interrupted
    assert sorted((record.agent, record.turn) for record in found.turns) == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)]
    assert found.failures == []
    assert server.open == 0
