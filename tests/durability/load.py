"""Agents that take turns on a server until they are stopped, and what it has answered by then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx

from tests.durability.restarting import TOKENS

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
