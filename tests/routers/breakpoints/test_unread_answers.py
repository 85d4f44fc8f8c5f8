"""Answers with activations that nobody reads: they keep their tenant from having more of them in memory."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.main import load_app
from tests.routers.breakpoints.pausing import TURN
from tests.serving import tiny_settings

AT_ONCE = max(1, (os.cpu_count() or 1) // 2)
"""Large answers that one tenant may leave unread."""


class Client:
    """Asks for a path, and reads of the answer no more than its header until it `reads`."""

    def __init__(self, app: FastAPI, path: str, accept: str = "*/*") -> None:
        self.begun = asyncio.Event()
        self._reads = asyncio.Event()
        host, server = (b"host", b"localhost"), ("localhost", 80)
        scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "path": path}
        scope |= {"raw_path": path.encode(), "query_string": b"", "root_path": "", "server": server}
        scope |= {"client": ("127.0.0.1", 1), "headers": [host, (b"accept", accept.encode())]}
        self.answer = asyncio.create_task(app(scope, self._receive, self._send))

    async def read(self) -> None:
        self._reads.set()
        await asyncio.wait_for(self.answer, 30)

    async def _receive(self) -> Any:
        if self._reads.is_set():
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b""}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
        else:
            self.begun.set()
            await self._reads.wait()


@pytest.fixture
async def app(roomy_model: Path) -> AsyncIterator[FastAPI]:
    settings = tiny_settings(model=str(roomy_model), max_model_len=8192, max_step_tokens=8192, kv_device=16 << 20)
    app = load_app(settings)
    async with app.router.lifespan_context(app):
        yield app


async def paused(app: FastAPI, tokens: int) -> str:
    """The path of a session that is paused in a context of so many tokens, and has captured it."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        path = f"/v1/sessions/{(await http.post('/v1/sessions')).json()['id']}"
        for action in ("capture", "pause"):
            (await http.post(f"{path}/breakpoints", json={"layers": [3], "action": action})).raise_for_status()
        body = {**TURN, "token_ids": [5] * tokens}
        turn = (await http.post(f"{path}/generate", json=body)).raise_for_status().json()
        assert turn["status"] == "paused"
        return path


@pytest.mark.parametrize(
    ("part", "accept"),
    [("captures", "*/*"), ("checkpoint/activation", "*/*"), ("checkpoint/activation", "application/json")],
)
async def test_a_large_answer_keeps_its_place_until_it_is_read(app: FastAPI, part: str, accept: str) -> None:
    path = await paused(app, 5000)
    unread = [Client(app, f"{path}/{part}", accept) for _ in range(AT_ONCE)]
    for each in unread:
        await asyncio.wait_for(each.begun.wait(), 30)
    waiting = Client(app, f"{path}/{part}", accept)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting.begun.wait(), 0.3)
    await unread[0].read()
    await asyncio.wait_for(waiting.begun.wait(), 30)
    for each in (waiting, *unread[1:]):
        await each.read()
