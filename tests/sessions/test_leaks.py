"""Nothing stays behind: file descriptors, threads, KV blocks, whatever clients do."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from httpx_sse import aconnect_sse

from tests.conftest import ServeWith

STREAMS = 64
CUT_OFF = STREAMS // 3


def held(http: httpx.Client) -> tuple[int, int]:
    """Sessions that are open and bytes of KV that they hold."""
    memory = http.get("/v1/memory").json()
    return memory["sessions"], memory["data"]["device"]["owned_bytes"]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_fifty_sessions_leave_no_descriptor_thread_or_block(serve_with: ServeWith) -> None:
    """The server runs in this process, so its descriptors and threads are ours."""
    http = serve_with()

    def use_one() -> None:
        session = http.post("/v1/sessions").json()["id"]
        http.post(f"/v1/sessions/{session}/generate", json={"prompt": "hello", "max_tokens": 3})
        assert http.delete(f"/v1/sessions/{session}").status_code == 204

    use_one()
    before = descriptors(), threading.active_count()
    for _ in range(50):
        use_one()
    assert held(http) == (0, 0)
    # asyncio keeps its pool of tokenizing threads; it may still have been growing.
    assert descriptors() <= before[0]
    assert threading.active_count() <= before[1] + (os.cpu_count() or 1) + 4


@pytest.fixture
async def many(serve_with: ServeWith) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.Client]]:
    http = serve_with(kv_device=16 << 20)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=http.base_url, timeout=60, limits=limits) as client:
        yield client, http


async def read_stream(client: httpx.AsyncClient, session: str, leave_after: int | None) -> list[str]:
    """Names of the events up to the end, or up to where this reader breaks the connection."""
    body = {"token_ids": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "stream": True}
    names: list[str] = []
    async with aconnect_sse(client, "POST", f"/v1/sessions/{session}/generate", json=body) as source:
        async for event in source.aiter_sse():
            names.append(event.event)
            if len(names) == leave_after:
                break
    return names


async def test_streams_that_are_cut_off_leave_nothing(many: tuple[httpx.AsyncClient, httpx.Client]) -> None:
    client, http = many
    choose = random.Random(0)
    created = await asyncio.gather(*(client.post("/v1/sessions") for _ in range(STREAMS)))
    sessions = [response.json()["id"] for response in created]
    leave = [choose.randint(1, 10) if index < CUT_OFF else None for index in range(STREAMS)]
    choose.shuffle(leave)
    read = await asyncio.gather(
        *(read_stream(client, session, after) for session, after in zip(sessions, leave, strict=True))
    )
    for names, after in zip(read, leave, strict=True):
        assert names[-1] == ("finished" if after is None else "token")
    deadline = time.monotonic() + 10
    while (busy := http.get("/v1/memory").json())["turns_running"] + busy["turns_waiting"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    for session in sessions:
        assert (await client.get(f"/v1/sessions/{session}")).json()["state"] == "idle"
        assert (await client.delete(f"/v1/sessions/{session}")).status_code == 204
    assert held(http) == (0, 0)
