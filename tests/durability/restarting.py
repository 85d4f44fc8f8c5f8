"""What tests of restarts and kills share: a server on a folder, turns of known length, and agents."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from app.journal.journal import FILE_NAME
from tests.processes import ServerProcess
from tests.serving import serve

TOKENS = 12
"""What a turn generates unless it is told otherwise."""


@contextmanager
def serving(folder: Path, **changed: Any) -> Iterator[httpx.Client]:
    """A client of a server that keeps its sessions in `folder`."""
    with serve(state_dir=folder, **changed) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


@contextmanager
def no_room(server: ServerProcess, folder: Path) -> Iterator[None]:
    """No file of the server may grow: what a full disk is to the journal."""
    size = (folder / f"{FILE_NAME}-wal").stat().st_size
    _, unlimited = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, unlimited))
    yield
    with contextlib.suppress(ProcessLookupError):  # it has ended
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))


def open_session(http: httpx.Client, **body: Any) -> str:
    answer = http.post("/v1/sessions", json=body)
    assert answer.status_code == 201
    session: str = answer.json()["id"]
    return session


def generate(http: httpx.Client, session: str, token_ids: list[int], max_tokens: int = TOKENS, **body: Any) -> Any:
    """The greedy turn's answer."""
    asked = {"token_ids": token_ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **body}
    answer = http.post(f"/v1/sessions/{session}/generate", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


PROMPT = [5, 6, 7]


class Load:
    """`answered` has the tokens of each session's turns."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.answered: dict[str, list[int]] = {}

    @property
    def turns(self) -> int:
        return sum(len(tokens) // (len(PROMPT) + TOKENS) for tokens in self.answered.values())

    async def until(self, turns: int) -> None:
        async with asyncio.timeout(60):
            while self.turns < turns:  # noqa: ASYNC110 (an answer is all that tells of it)
                await asyncio.sleep(0.005)

    async def agent(self, session: str | None) -> None:
        """Take turns in the session; None: in a new one."""
        if session is None:
            session = (await self._client.post("/v1/sessions")).json()["id"]
        body = {"token_ids": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        while True:
            answer = (await self._client.post(f"/v1/sessions/{session}/generate", json=body)).raise_for_status()
            self.answered.setdefault(session, []).extend([*PROMPT, *answer.json()["token_ids"]])


@asynccontextmanager
async def load_on(url: str, sessions: Sequence[str | None]) -> AsyncIterator[Load]:
    """An agent for each of the sessions (None: a new one), in a block."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        load = Load(client)
        agents = [asyncio.create_task(load.agent(session)) for session in sessions]
        try:
            yield load
        finally:
            for agent in agents:
                agent.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*agents)
