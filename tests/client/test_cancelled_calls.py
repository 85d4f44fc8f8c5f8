"""A session that is opened or closed for somebody who no longer waits for it does not stay on the server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from client import AsyncDjinn, AsyncSession, transport

ATTEMPTS = 40
APART_S = 0.0005
"""How much longer one attempt waits than the one before: some cancel before the request, some after the answer."""

Open = Callable[[], Awaitable[AsyncSession]]


async def cancel_openings(open_session: Open) -> list[AsyncSession]:
    """Cancel one opening after another at a later moment each; what was opened in time."""
    opened = []
    for attempt in range(ATTEMPTS):
        opening = asyncio.ensure_future(open_session())
        await asyncio.sleep(attempt * APART_S)
        opening.cancel()
        try:
            opened.append(await opening)
        except asyncio.CancelledError:
            continue
    return opened


async def ids(djinn: AsyncDjinn) -> set[str]:
    return {session.id async for session in djinn.sessions.list()}


async def test_sessions_whose_opening_is_cancelled_are_closed(server_url: str, tmp_path: Path) -> None:
    file = tmp_path / "session.safetensors"
    async with AsyncDjinn(server_url, timeout=30) as djinn, await djinn.sessions.create() as parent:
        await parent.generate(token_ids=[1, 2, 3], max_tokens=1)
        await parent.export_to(file)
        before = await ids(djinn)
        ways: list[Open] = [djinn.sessions.create, parent.fork, lambda: djinn.sessions.import_from(file)]
        for way in ways:
            for session in await cancel_openings(way):
                await session.close()
            assert await ids(djinn) == before


async def test_sessions_whose_closing_is_cancelled_are_closed(server_url: str) -> None:
    async with AsyncDjinn(server_url, timeout=30) as djinn:
        before = await ids(djinn)
        for steps in range(1, ATTEMPTS):
            session = await djinn.sessions.create()
            closing = asyncio.ensure_future(session.close())
            for _ in range(steps):
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
        assert await ids(djinn) == before


async def test_a_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ABANDON_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with AsyncDjinn(url, timeout=30) as djinn:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await djinn.sessions.create()
