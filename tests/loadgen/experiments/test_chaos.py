"""`loadgen chaos`: faults and which errors they explain, agents that find what is wrong, and a cluster under faults."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client import AsyncDjinn
from client.errors import ConnectionLost, DjinnError, ServerError, Timeout
from loadgen.experiments.chaos.agents import Mirror, SessionAgent
from loadgen.experiments.chaos.experiment import judge
from loadgen.experiments.chaos.plan import ChaosPlan, Fault, Findings, Notes
from loadgen.report.tables import Outcome, Row
from tests.serving import serve
from tests.waiting import until

HOUR_S = 3600.0


def samples(sizes: Iterable[tuple[float, int]]) -> list[Row]:
    """Of seconds and resident memory."""
    return [{"second": at_s, "resident memory, MiB": float(rss)} for at_s, rss in sizes]


def calm() -> Findings:
    """An hour with a fault, in which all was right: every target is met."""
    return Findings(
        duration_s=HOUR_S,
        answers=10,
        tokens=120,
        faults=[Fault("kill of the engine", 1000.0, 1005.0, "ready after 5.0 s")],
        samples=samples((float(second), 1 << 30) for second in range(0, 3600, 10)),
    )


EXPLAINED = [
    ConnectionLost("gone"),
    ServerError("dead", status=503, code="engine_restarting"),
    ServerError("full", code="not_durable"),
]
NEVER = [ServerError("a bug", status=500, code="internal_error", request_id="request-1"), Timeout("silent")]


@pytest.mark.parametrize("error", [*EXPLAINED, *NEVER])
def test_an_error_is_expected_only_while_a_fault_lasts_and_no_fault_explains_a_bug(error: DjinnError) -> None:
    findings = Findings()
    notes = Notes(findings)
    notes.failed("agent-0", "turn", notes.seconds, error)
    sent_s = notes.seconds
    with notes.disturbed("kill of the engine"):
        notes.failed("agent-0", "turn", notes.seconds, error)
    notes.failed("agent-0", "turn", sent_s, error)
    assert sum(findings.expected.values()) == (2 if error in EXPLAINED else 0)
    told = findings.unexpected[-1]
    assert len(findings.unexpected) == (1 if error in EXPLAINED else 3)
    assert str(told["error"]).startswith(type(error).__name__)
    assert (told["message"], told["request"]) == (error.message, error.request_id)


PLAN = ChaosPlan()
LOST: Row = {"second": 5.0, "agent": "agent-1", "action": "turn", "error": "ServerError 500", "message": "a bug"}
WRONG: Row = {"second": 5.0, "agent": "agent-1", "position": 3, "answer": "(1, 2)", "the twin's": "(1, 3)"}


def outcomes(findings: Findings) -> dict[str, Outcome]:
    return {one.name: one.outcome for one in judge(PLAN, findings) if one.outcome is not None}


@pytest.mark.parametrize(
    ("missed", "changed"),
    [
        (set(), {}),
        ({"answers compared with the twin's"}, {"answers": 0}),
        ({"wrong answers"}, {"wrong": [WRONG]}),
        ({"errors that no fault explains"}, {"unexpected": [LOST]}),
        ({"faults"}, {"faults": []}),
    ],
)
def test_a_calm_hour_meets_every_target_and_each_can_be_missed(missed: set[str], changed: dict[str, Any]) -> None:
    found = outcomes(replace(calm(), **changed))
    assert {name for name, outcome in found.items() if outcome is not Outcome.MET} == missed


LAYERS = 4
ENOUGH = 12
"""Answers, among them those of forks, moves and rewinds."""


async def found(
    url: str, twin: str, folder: Path, meanwhile: Callable[[AsyncDjinn, Findings], Awaitable[None]] | None = None
) -> Findings:
    """What an agent finds until it has enough answers; `meanwhile` comes before the last of them."""
    findings, stop = Findings(), asyncio.Event()
    async with AsyncDjinn(url) as djinn, AsyncDjinn(twin) as other:
        agent = SessionAgent(0, ChaosPlan(), LAYERS, djinn, Mirror(other), Notes(findings), folder)
        running = asyncio.create_task(agent.run(stop))
        await until(lambda: findings.answers >= ENOUGH // 2 or running.done())
        if meanwhile is not None:
            await meanwhile(djinn, findings)
        await until(lambda: findings.answers >= ENOUGH or running.done())
        stop.set()
        await running
    return findings


@pytest.mark.long
async def test_another_models_tokens_are_wrong(url: str, tmp_path: Path) -> None:
    with serve(seed=1) as other:
        findings = await found(url, other, tmp_path)
    assert findings.wrong
    assert not findings.unexpected
    assert all(one["answer"] != one["the twin's"] for one in findings.wrong)


@pytest.mark.long
async def test_a_session_that_is_gone_is_found(url: str, tmp_path: Path) -> None:
    async def close(djinn: AsyncDjinn, findings: Findings) -> None:
        """Again and again: an agent that moves its session to a file has none for a moment."""
        while not findings.unexpected:
            async for session in djinn.sessions.list():
                await asyncio.gather(session.close(), return_exceptions=True)
            await asyncio.sleep(0)

    with serve() as twin:
        findings = await found(url, twin, tmp_path, close)
    assert "the session is gone" in {one["message"] for one in findings.unexpected}
    assert not findings.wrong
