"""Answers with activations that nobody reads: they keep their tenant from having more of them in memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.main import load_app
from app.routers import breakpoints, checkpoint
from app.web.binary import PART_BYTES, LargeAnswer
from tests.routers.breakpoints.pausing import TURN
from tests.serving import tiny_settings


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
async def app(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FastAPI]:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # one answer at a time
    app = load_app(tiny_settings())
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def paused(app: FastAPI) -> str:
    """The path of a session that is paused, and has captured something."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        session = (await http.post("/v1/sessions")).json()["id"]
        path = f"/v1/sessions/{session}"
        for action in ("capture", "pause"):
            (await http.post(f"{path}/breakpoints", json={"layers": [1], "action": action})).raise_for_status()
        turn = (await http.post(f"{path}/generate", json=TURN)).raise_for_status().json()
        assert turn["status"] == "paused"
        return path


@pytest.mark.parametrize(
    ("part", "accept"),
    [("captures", "*/*"), ("checkpoint/activation", "*/*"), ("checkpoint/activation", "application/json")],
)
async def test_a_large_answer_keeps_its_place_until_it_is_read(
    app: FastAPI, paused: str, part: str, accept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for router in (breakpoints, checkpoint):
        monkeypatch.setattr(router, "PART_BYTES", 100)  # so these are large
    unread, waiting = (Client(app, f"{paused}/{part}", accept) for _ in range(2))
    await asyncio.wait_for(unread.begun.wait(), 30)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting.begun.wait(), 0.3)
    await unread.read()
    await asyncio.wait_for(waiting.begun.wait(), 30)
    await waiting.read()


async def test_a_small_answer_that_is_not_read_keeps_nobody_waiting(app: FastAPI, paused: str) -> None:
    unread, other = (Client(app, f"{paused}/{part}") for part in ("captures", "checkpoint/activation"))
    await asyncio.wait_for(unread.begun.wait(), 30)
    await asyncio.wait_for(other.begun.wait(), 30)
    await other.read()
    await unread.read()


async def test_a_large_answer_goes_out_in_parts() -> None:
    content = os.urandom(3 * PART_BYTES + 5)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    await LargeAnswer(content)({"type": "http"}, receive, send)
    head, *parts = sent
    assert dict(head["headers"])[b"content-length"] == str(len(content)).encode()
    assert max(len(part["body"]) for part in parts) <= PART_BYTES
    assert b"".join(part["body"] for part in parts) == content
    assert [part.get("more_body", False) for part in parts] == [True] * 4 + [False]
