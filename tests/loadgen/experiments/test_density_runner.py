"""The runner keeps its clock and its books, whatever a server does, and says meanwhile how far it is."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest

import client
from loadgen.experiments.density import runner
from loadgen.experiments.density.live import LiveView
from loadgen.experiments.density.progress import Follower
from loadgen.experiments.density.runner import Runner
from loadgen.experiments.density.wording import told
from loadgen.load.prompts import TokenIds
from loadgen.load.records import Failure, Run, Sample, TurnCost, TurnRecord
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

    FAIL, STUTTER, SILENT, CLOSE_BADLY, DEAF, SLOW_TO_HEAR = range(-6, 0)

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
        await asyncio.sleep(TURN_S)
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


@pytest.mark.parametrize(
    ("turns", "kind"),
    [([Server.SLOW_TO_HEAR, 1], "Timeout"), ([Server.DEAF, 1], "Conflict"), ([Server.CLOSE_BADLY], "NotFound")],
)
async def test_what_fails_between_turns_is_reported_and_the_agent_goes_on(turns: list[int], kind: str) -> None:
    """Signals and the end of the conversation."""
    found = await run(Server(), [plan(0.0, *(len(turns) - 1) * [0.0])], [turns], turn_timeout_s=2 * TURN_S)
    assert [(failure.agent, failure.turn, failure.kind) for failure in found.failures] == [(0, None, kind)]
    assert len(found.turns) == len(turns)
    assert found.signals == []


# What is said of a run while it goes.

THINKS = TurnPlan(10, 5, 4.0, None, False)
LAST = TurnPlan(10, 5, None, None, False)
TRACE = (AgentPlan(0.0, (THINKS, LAST)), AgentPlan(1.0, (THINKS, LAST)), AgentPlan(20.0, (LAST,)))


def turn(agent: int, number: int, sent_s: float, ttft_s: float = 0.5) -> TurnRecord:
    """A turn of 5 tokens that takes a second."""
    return TurnRecord(agent, number, sent_s, sent_s, (ttft_s,), 1.0, TurnCost(10, 5, 0, 0))


def test_figures_so_far() -> None:
    """A failed turn is its agent's last."""
    so_far = Run(
        turns=[turn(0, 0, 0.0, 9.0), turn(0, 1, 5.0, 0.2), turn(1, 1, 6.0, 0.4)],
        failures=[Failure(1, 2, 0.4, "Timeout", ""), Failure(0, None, 0.4, "Timeout", "")],
        samples=[Sample(0.0, {"device": 2, "to_host": 1, "to_device": 2}, {}, None, None, None, None, None)],
    )
    seen = Follower(TRACE).look(so_far, 10.0)
    assert (seen.completed, seen.planned, seen.failed, seen.done) == (3, 5, 1, 2)
    assert (seen.resumed_p50_s, seen.resumed_p99_s) == pytest.approx((0.3, 0.398))
    assert seen.tokens_per_s == pytest.approx(1.5)
    assert seen.sessions == {"device": 2, "host": 0, "disk": 0, "moving": 3}


def test_a_server_that_takes_a_minute_to_start_does_not_make_the_run_look_a_minute_old() -> None:
    view = LiveView(["djinn"], TRACE, repeats=1)
    watched = view.begin("djinn", 0)
    assert view.look() == ("djinn", "the server starts")
    clock = TurnClock()
    watched.changed(Run(), {clock})
    clock.tokens()
    line = told(*view.look())
    assert "0 of 5 turns, 0 failed; 1 of 3 arrived: 0 thinking, 1 generating, 0 done; " in line
    assert "; 1 tokens, " in line
    assert "0:00" in line
