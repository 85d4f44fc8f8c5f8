"""What every attacker has: a server, a key, and a count of what it was answered."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

BREATH_S = 0.001
"""After each request, so that one that is refused at once leaves the attacker's process some time."""


@dataclass(frozen=True, slots=True)
class Model:
    """Of the server that is attacked."""

    name: str
    vocabulary: int
    hidden_size: int
    layers: int
    context: int


@dataclass(slots=True)
class Target:
    """A server as one attacker sees it. `client` has the attacker's key."""

    client: httpx.AsyncClient
    key: str
    model: Model
    chance: random.Random
    answers: Counter[str] = field(default_factory=Counter)
    """By status, or by the name of what went wrong with the connection."""

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer, whatever it is. Raises httpx's `HTTPError` if there is none."""
        answer = await self.client.request(method, path, **options)
        self.answers[str(answer.status_code)] += 1
        return answer

    async def post(self, path: str, body: object = None) -> Any:
        """The answer's JSON; an empty dictionary where it is an error."""
        answer = await self.request("POST", path, json=body)
        return answer.json() if answer.is_success and answer.content else {}

    async def open(self) -> str:
        """The path of a new session. Raises `Refused`."""
        found = await self.post("/v1/sessions", {})
        if "id" not in found:
            raise Refused
        return f"/v1/sessions/{found['id']}"

    async def turn(self, session: str, prompt: int, max_tokens: int, **body: object) -> Any:
        """A greedy turn of so many random tokens; the answer's JSON."""
        asked = {"token_ids": self.token_ids(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return await self.post(f"{session}/generate", {**asked, **body})

    async def alone(self, prompt: int, max_tokens: int, **body: object) -> None:
        """A turn in a session of its own, which is closed then."""
        session = await self.open()
        try:
            await self.turn(session, prompt, max_tokens, **body)
        finally:
            await self.request("DELETE", session)

    def token_ids(self, count: int) -> list[int]:
        """Random tokens that are no special ones, as far as models agree on that."""
        return [self.chance.randrange(20, self.model.vocabulary) for _ in range(count)]

    def vector(self) -> list[float]:
        """A small random direction."""
        return [round(self.chance.gauss(0, 0.01), 4) for _ in range(self.model.hidden_size)]


class Refused(Exception):
    """The server does not let the attacker begin."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to harm others. `run` goes on until it is cancelled."""

    name: str
    description: str
    run: Callable[[Target], Awaitable[None]]


async def again_and_again(target: Target, count: int, once: Callable[[], Awaitable[object]]) -> None:
    """`once` for ever, `count` times at once. What goes wrong is counted."""

    async def repeat() -> None:
        while True:
            try:
                await once()
            except Refused:
                target.answers["refused"] += 1
                await asyncio.sleep(0.1)
            except (httpx.HTTPError, OSError) as error:
                target.answers[type(error).__name__] += 1
            await asyncio.sleep(BREATH_S)

    await asyncio.gather(*(repeat() for _ in range(count)))
