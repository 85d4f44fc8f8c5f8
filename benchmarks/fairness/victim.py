"""The client whose waits count: one session, short turns, streamed, one after the other."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from httpx_sse import aconnect_sse

PROMPT, ANSWER = 64, 16
THINK_S = 0.2
MOST_TOKENS = 700
"""Then the conversation begins anew."""
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds to the first token, and of each after it. Both are as long as was waited where the turn failed."""

    first_s: float
    token_s: float
    token_ids: tuple[int, ...]
    error: str = ""


@dataclass(slots=True)
class Victim:
    """Takes the same turns each time."""

    client: httpx.AsyncClient
    vocabulary: int
    turns: list[Turn] = field(default_factory=list)
    computed: int = 0
    """Tokens that the server computed for it."""

    async def run(self, seconds: float) -> None:
        """Take turns for so long, and at least one."""
        chance, end = random.Random(7), time.perf_counter() + seconds
        session, tokens = "", 0
        while not self.turns or time.perf_counter() < end:
            prompt = [chance.randrange(20, self.vocabulary) for _ in range(PROMPT)]
            began = time.perf_counter()
            try:
                if not session or tokens > MOST_TOKENS:
                    session, tokens = await self._open(session), 0
                    began = time.perf_counter()
                self.turns.append(await self._turn(session, prompt, began))
            except (httpx.HTTPError, KeyError) as error:
                waited = time.perf_counter() - began
                self.turns.append(Turn(waited, waited, (), f"{type(error).__name__}: {error}"[:200]))
                return
            tokens += PROMPT + ANSWER
            await asyncio.sleep(THINK_S)

    async def _open(self, last: str) -> str:
        if last:
            await self.client.delete(last)
        answer = (await self.client.post("/v1/sessions", json={})).raise_for_status()
        return f"/v1/sessions/{answer.json()['id']}"

    async def _turn(self, session: str, prompt: list[int], began: float) -> Turn:
        body = {"token_ids": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": True}
        first: float | None = None
        told: dict[str, Any] = {}
        async with aconnect_sse(self.client, "POST", f"{session}/generate", json=body) as source:
            source.response.raise_for_status()
            async for event in source.aiter_sse():
                if event.event == "token" and first is None:
                    first = time.perf_counter()
                told = event.json()
        now = time.perf_counter()
        first = now if first is None else first
        usage = told["usage"]
        self.computed += usage["prompt_tokens"] - usage["cached_tokens"] + usage["completion_tokens"] - 1
        return Turn(first - began, (now - first) / (ANSWER - 1), tuple(told["token_ids"]))
