"""A `kill -9` of the engine at any moment: the server stays, no finished turn is lost, each token is right."""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.durability.restarting import TOKENS, generate, open_session
from tests.durability.test_kills import TIERS
from tests.engine_process.test_engine_process import engine_of
from tests.processes import ServerProcess, serve_process

KILLS = int(os.environ.pop("DJINN_TEST_ENGINE_KILLS", "2"))
AGENTS = 6
TURNS_BETWEEN = 12
MOST_TOKENS = 700
"""Of one session: its context ends at 1,024."""
BACK_S = 60.0


@dataclass
class Agent:
    """Takes turns, repeats those that the engine's death ended, and opens another session when one is full."""

    choose: random.Random
    session: str = ""
    prompts: list[list[int]] = field(default_factory=list)
    made: list[list[int]] = field(default_factory=list)
    done: list[tuple[list[list[int]], list[list[int]]]] = field(default_factory=list)
    refused: int = 0

    async def run(self, client: httpx.AsyncClient, stop: asyncio.Event) -> None:
        while not stop.is_set():
            if not self.session or sum(map(len, self.prompts)) + TOKENS * len(self.made) > MOST_TOKENS:
                await self.begin(client)
            await self.take_turn(client)
            phase = self.choose.choice(["io_wait", "idle", "ready", None])
            if phase is not None:
                await self.post(client, f"/v1/sessions/{self.session}/phase", {"phase": phase})
            await asyncio.sleep(self.choose.uniform(0, 0.03))

    async def begin(self, client: httpx.AsyncClient) -> None:
        self.end()
        self.session = (await self.post(client, "/v1/sessions", {})).json()["id"]

    def end(self) -> None:
        """The session's turns are to be compared."""
        if self.made:
            self.done.append((self.prompts, self.made))
        self.prompts, self.made = [], []

    async def take_turn(self, client: httpx.AsyncClient) -> None:
        prompt = [self.choose.randint(3, 200) for _ in range(self.choose.randint(1, 8))]
        body = {"token_ids": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = (await self.post(client, f"/v1/sessions/{self.session}/generate", body)).json()
        self.prompts.append(prompt)
        self.made.append(answer["token_ids"])

    async def post(self, client: httpx.AsyncClient, path: str, body: object) -> httpx.Response:
        """The answer, once it is none that asks to repeat the request."""
        deadline = time.monotonic() + BACK_S
        while (answer := await client.post(path, json=body)).status_code == 503:
            assert answer.json()["error"]["code"] == "engine_restarting"
            assert time.monotonic() < deadline
            self.refused += 1
            await asyncio.sleep(0.1)
        return answer.raise_for_status()


async def kill_often(server: ServerProcess, client: httpx.AsyncClient, agents: list[Agent]) -> list[float]:
    """Kill the engine again and again while the agents go on. Returns how long each time `/ready` was not 200, in s."""
    choose, away = random.Random(1), []
    for _ in range(KILLS):
        enough = turns(agents) + TURNS_BETWEEN
        while turns(agents) < enough:  # noqa: ASYNC110 (no event says so)
            await asyncio.sleep(0.002)
        await asyncio.sleep(choose.uniform(0, 0.05))
        engine_of(server).kill()
        began = time.monotonic()
        for is_awaited in (False, True):  # first its death, then its return
            while ((await client.get("/ready")).status_code == 200) != is_awaited:  # noqa: ASYNC110 (no event says so)
                await asyncio.sleep(0.002)
        away.append(time.monotonic() - began)
    return away


def turns(agents: list[Agent]) -> int:
    return sum(len(agent.made) + sum(len(made) for _, made in agent.done) for agent in agents)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_no_kill_of_the_engine_loses_a_finished_turn(tmp_path: Path) -> None:
    """`DJINN_TEST_ENGINE_KILLS` says how many kills (default: 2). The times until `/ready` are printed, not judged."""
    agents = [Agent(random.Random(number)) for number in range(AGENTS)]
    with serve_process(tmp_path / "state", *TIERS, own_engine=True) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=BACK_S) as client:
            stop = asyncio.Event()
            running = [asyncio.create_task(agent.run(client, stop)) for agent in agents]
            away = await kill_often(server, client, agents)
            stop.set()
            await asyncio.gather(*running)
            print(f"seconds until ready: {', '.join(f'{each:.1f}' for each in away)}")
            for agent in agents:
                tokens = sum(map(len, agent.prompts)) + TOKENS * len(agent.made)
                assert (await client.get(f"/v1/sessions/{agent.session}")).json()["tokens"] == tokens
                agent.end()
    assert sum(agent.refused for agent in agents) > 0
    compare_with_uninterrupted(tmp_path / "uninterrupted", agents)


def compare_with_uninterrupted(folder: Path, agents: list[Agent]) -> None:
    """All turns were those of sessions whose engine has never died."""
    with serve_process(folder) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        for prompts, made in (each for agent in agents for each in agent.done):
            session = open_session(http)
            assert [generate(http, session, prompt)["token_ids"] for prompt in prompts] == made
