"""One agent on a real server with a tiny model, and what it finds when something is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from client import AsyncDjinn
from loadgen.experiments.soak.agent import SessionAgent
from loadgen.experiments.soak.findings import Findings
from loadgen.experiments.soak.notes import Notes
from loadgen.experiments.soak.plan import SoakPlan
from loadgen.experiments.soak.twin import Mirror
from tests.loadgen.waiting import until
from tests.serving import serve

LAYERS = 4
ENOUGH = 12
"""Answers, among them those of forks, moves and rewinds."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve() as url:
        yield url


@pytest.fixture(scope="module")
def twin() -> Iterator[str]:
    with serve() as url:
        yield url


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def found(
    url: str, twin: str, folder: Path, meanwhile: Callable[[AsyncDjinn, Findings], Awaitable[None]] | None = None
) -> Findings:
    """What an agent finds until it has enough answers; `meanwhile` comes before the last of them."""
    findings, stop = Findings(), asyncio.Event()
    async with AsyncDjinn(url) as djinn, AsyncDjinn(twin) as other:
        agent = SessionAgent(0, SoakPlan(), LAYERS, djinn, Mirror(other), Notes(findings), folder)
        running = asyncio.create_task(agent.run(stop))
        await until(lambda: findings.answers >= ENOUGH // 2 or running.done())
        if meanwhile is not None:
            await meanwhile(djinn, findings)
        await until(lambda: findings.answers >= ENOUGH or running.done())
        stop.set()
        await running
    return findings


async def test_where_nothing_is_wrong_nothing_is_found(url: str, twin: str, tmp_path: Path) -> None:
    findings = await found(url, twin, tmp_path)
    assert findings.answers >= ENOUGH
    assert (findings.wrong, findings.unexpected, findings.expected) == ([], [], {})
    assert files(tmp_path) == []
    async with AsyncDjinn(url) as djinn:
        assert len([session async for session in djinn.sessions.list()]) == 1


async def test_another_models_tokens_are_wrong(url: str, tmp_path: Path) -> None:
    with serve(seed=1) as other:
        findings = await found(url, other, tmp_path)
    assert findings.wrong
    assert not findings.unexpected
    assert all(one.made != one.expected for one in findings.wrong)


async def test_a_session_that_is_gone_is_found(url: str, twin: str, tmp_path: Path) -> None:
    async def close(djinn: AsyncDjinn, findings: Findings) -> None:
        """Again and again: an agent that moves its session to a file has none for a moment."""
        while not findings.unexpected:
            async for session in djinn.sessions.list():
                await asyncio.gather(session.close(), return_exceptions=True)
            await asyncio.sleep(0)

    findings = await found(url, twin, tmp_path, close)
    assert "the session is gone" in {one.message for one in findings.unexpected}
    assert not findings.wrong


async def test_a_history_that_was_cut_is_found(url: str, twin: str, tmp_path: Path) -> None:
    """Somebody else cuts it behind the agent's back."""

    async def cut(djinn: AsyncDjinn, findings: Findings) -> None:
        while not findings.unexpected and not findings.wrong:
            async for session in djinn.sessions.list():
                if session.info.state == "idle" and session.info.tokens:
                    await asyncio.gather(session.rewind(0), return_exceptions=True)
            await asyncio.sleep(0)

    findings = await found(url, twin, tmp_path, cut)
    assert findings.wrong or findings.unexpected
