"""A `kill -9` at any moment: no finished turn is lost, and a client that asks again is told what was done."""

import asyncio
import json
import os
import random
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import aconnect_sse, connect_sse
from openai import OpenAI
from openai.types.responses import Response, ResponseIncompleteEvent

from tests.durability.restarting import TOKENS, open_session, serving
from tests.processes import serve_process
from tests.waiting import wait_until

KILLS = int(os.environ.pop("DJINN_TEST_KILLS", "4"))
"""Taken out of the environment: a server refuses `DJINN_` variables that are no settings of its own."""
KILLS_OF_A_SESSION = 4
"""No more, so that histories stay well within the model's context."""
AGENTS = 6
LAST_PROMPT = [11]
TIERS = ("--kv-device", "1x1024", "--kv-host", "1x1024")
"""Room for a fraction of the agents' KV, so that it also moves under pressure."""


def asked(prompt: list[int], *, stream: bool = False) -> dict[str, Any]:
    return {"token_ids": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}


async def take_turn(
    client: httpx.AsyncClient, path: str, prompt: list[int], *, stream: bool = False
) -> list[int] | None:
    """The turn's tokens; None if its stream broke off."""
    body = asked(prompt, stream=stream)
    if not stream:
        answer = (await client.post(f"{path}/generate", json=body)).raise_for_status().json()
        return list(answer["token_ids"])
    async with aconnect_sse(client, "POST", f"{path}/generate", json=body) as source:
        async for event in source.aiter_sse():
            if event.event == "finished":
                return list(event.json()["token_ids"])
    return None


@dataclass
class Agent:
    """One session, driven turn by turn through kills. `made` are the turns whose `finished` has come, or must have."""

    session: str
    choose: random.Random
    prompts: list[list[int]] = field(default_factory=list)
    made: list[list[int] | None] = field(default_factory=list)
    """The turns' tokens; None: the server was killed before it told them, but had kept them."""
    on_disk: bool = False
    """Whether its KV had come to rest on disk before the last kill."""

    @property
    def path(self) -> str:
        return f"/v1/sessions/{self.session}"

    @property
    def tokens(self) -> int:
        """Length of the history after the turns in `made`."""
        return sum(len(prompt) + TOKENS for prompt in self.prompts[: len(self.made)])

    async def run(self, client: httpx.AsyncClient) -> None:
        """Take turns, with a signal or without one between them, until the connection breaks."""
        try:
            while await self._take_turn(client):
                phase = self.choose.choice(["io_wait", "idle", "ready", None])
                if phase is not None:
                    await self._signal(client, phase)
                await asyncio.sleep(self.choose.uniform(0, 0.03))
        except httpx.TransportError:
            return

    async def leave(self, client: httpx.AsyncClient) -> None:
        """Take a turn and be gone for long: return when the KV is on disk, where nothing moves it any more."""
        assert await self._take_turn(client)
        await self._signal(client, "idle")
        async with asyncio.timeout(60):
            while (await client.get(self.path)).json()["kv"]["tier"] != "disk":  # noqa: ASYNC110 (no event says so)
                await asyncio.sleep(0.005)
        self.on_disk = True

    async def _signal(self, client: httpx.AsyncClient, phase: str) -> None:
        (await client.post(f"{self.path}/phase", json={"phase": phase})).raise_for_status()

    async def _take_turn(self, client: httpx.AsyncClient) -> bool:
        """Whether the turn has been told to its end."""
        self.prompts.append([self.choose.randint(3, 200) for _ in range(self.choose.randint(1, 8))])
        token_ids = await take_turn(client, self.path, self.prompts[-1], stream=self.choose.random() < 0.5)
        if token_ids is not None:
            self.made.append(token_ids)
        return token_ids is not None

    def catch_up(self, view: dict[str, Any]) -> None:
        """After a restart: the turn that ran at the kill is there whole, or not at all, and KV on disk is still there.

        `view` is what the server says of the session then.
        """
        if view["tokens"] != self.tokens:
            self.made.append(None)
        assert view["tokens"] == self.tokens
        assert not self.on_disk or (view["kv"]["tier"] == "disk" and view["kv"]["disk_bytes"] > 0)
        self.on_disk = False
        del self.prompts[len(self.made) :]


async def run_until_killed(folder: Path, agents: list[Agent], choose: random.Random, *flags: str) -> Agent:
    """Start the server, compare what it brings back, and kill it after some turns of the agents.

    Returns the agent that left before: at least one session has its KV on disk at each kill.
    """
    with serve_process(folder, *flags, *TIERS, own_engine=KILLS > KILLS_OF_A_SESSION) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            while len(agents) < AGENTS:
                session = (await client.post("/v1/sessions")).raise_for_status().json()["id"]
                agents.append(Agent(session, random.Random(choose.random())))
            for agent in agents:
                agent.catch_up((await client.get(agent.path)).json())
            enough = sum(len(agent.made) for agent in agents) + choose.randint(AGENTS, 5 * AGENTS)
            leaving = choose.choice(agents)
            await leaving.leave(client)
            running = [asyncio.create_task(agent.run(client)) for agent in agents if agent is not leaving]
            while sum(len(agent.made) for agent in agents) < enough:  # noqa: ASYNC110 (no event says so)
                await asyncio.sleep(0.001)
            await asyncio.sleep(choose.uniform(0, 0.02))
            await asyncio.to_thread(server.kill)
            await asyncio.gather(*running)
    return leaving


async def repeat(client: httpx.AsyncClient, agent: Agent) -> None:
    """All turns were those of a session that no kill has ever interrupted."""
    session = (await client.post("/v1/sessions")).raise_for_status().json()["id"]
    for prompt, made in zip(agent.prompts, agent.made, strict=True):
        assert made in (None, await take_turn(client, f"/v1/sessions/{session}", prompt))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-hybrid"])
@pytest.mark.parametrize("first", range(0, KILLS, KILLS_OF_A_SESSION))
async def test_no_kill_loses_a_finished_turn(tmp_path: Path, first: int, model: str) -> None:
    """`DJINN_TEST_KILLS` says how many kills there are in all, from number 0 on (default: 4); `first` begins a test
    with sessions of its own. With more than the default the engine has a process of its own, which starts slowly.
    """
    folder, choose, agents = tmp_path / "state", random.Random(first), list[Agent]()
    flags = "--model", f"random:{model}"
    for _ in range(min(KILLS_OF_A_SESSION, KILLS - first)):
        left = await run_until_killed(folder, agents, choose, *flags)
    with serve_process(folder, *flags) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            for agent in agents:
                agent.catch_up((await client.get(agent.path)).json())
                turn = (await client.post(f"{agent.path}/generate", json=asked(LAST_PROMPT))).raise_for_status().json()
                if agent is left:  # it goes on from KV that is all read from disk
                    assert turn["usage"]["cached_tokens"] == agent.tokens - 1  # the last one was sampled, not computed
                    assert (await client.get(agent.path)).json()["usage"]["bytes_in"] > 0
                agent.prompts.append(LAST_PROMPT)
                agent.made.append(turn["token_ids"])
            await asyncio.gather(*(repeat(client, agent) for agent in agents))


TURN: dict[str, Any] = {"prompt": "Once", "max_tokens": 24, "temperature": 1.0, "ignore_eos": True}
KEY = {"Idempotency-Key": "one"}


def history(http: httpx.Client, session: str) -> list[int]:
    found: list[int] = http.get(f"/v1/sessions/{session}/history").raise_for_status().json()["token_ids"]
    return found


def send_and_go(url: str, path: str, body: dict[str, Any], key: str) -> socket.socket:
    """Send a request with its key, and read none of its answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection, content = socket.create_connection((host, int(port))), json.dumps(body, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nIdempotency-Key: {key}\r\nContent-Type: application/json\r\n"
    connection.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def test_a_turn_that_was_done_before_the_kill_is_told_and_one_that_was_not_is_taken(tmp_path: Path) -> None:
    with serve_process(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        done, begun = open_session(http), open_session(http)
        path = f"/v1/sessions/{done}/generate"
        with send_and_go(server.url, path, TURN, "one"):
            wait_until(lambda: len(history(http, done)) > 24)
            wait_until(lambda: http.get(f"/v1/sessions/{done}").json()["state"] == "idle")
            expected = history(http, done)
            http.post("/v1/sessions").raise_for_status()  # the journal has what came before
        longer = {**TURN, "max_tokens": 900}
        with send_and_go(server.url, f"/v1/sessions/{begun}/generate", longer, "two"):
            wait_until(lambda: http.get(f"/v1/sessions/{begun}").json()["state"] == "running")
            asked = {"model": "tiny-llama", "input": "Hi", "background": True, "ignore_eos": True}
            lost = http.post("/v1/responses", json=asked).json()
            server.kill()
    with serve_process(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        answer = http.post(path, json=TURN, headers=KEY)
        assert answer.headers["idempotent-replayed"] == "true"
        assert answer.json()["token_ids"] == expected[-24:]
        assert answer.json()["usage"]["completion_tokens"] == 24
        assert history(http, done) == expected
        assert history(http, begun) == []
        failed = http.get(f"/v1/responses/{lost['id']}").json()
        assert (lost["status"], failed["status"], failed["error"]["code"]) == ("queued", "failed", "server_error")
        for _ in range(2):
            taken = http.post(f"/v1/sessions/{begun}/generate", json=longer, headers={"Idempotency-Key": "two"})
            assert len(taken.json()["token_ids"]) == 900


def test_after_a_restart_answers_are_the_same(tmp_path: Path) -> None:
    created = {"metadata": {"name": "kept"}}
    keys = {name: {"Idempotency-Key": name} for name in ("open", "fork", "turn", "stop", "stream")}
    with serving(tmp_path) as http:
        session = http.post("/v1/sessions", json=created, headers=keys["open"]).json()["id"]
        path = f"/v1/sessions/{session}"
        fork = http.post(f"{path}/fork", headers=keys["fork"]).json()["id"]
        turn = http.post(f"{path}/generate", json=TURN, headers=keys["turn"]).json()
        stopping = {**TURN, "stop": [turn["text"][4:6]], "seed": 1}
        stopped = http.post(f"{path}/generate", json=stopping, headers=keys["stop"]).json()
        streamed = read_stream(http, f"{path}/generate", keys["stream"])
        before = history(http, session)
    for _ in range(2):
        with serving(tmp_path) as http:
            assert http.post("/v1/sessions", json=created, headers=keys["open"]).json()["id"] == session
            assert http.post(f"{path}/fork", headers=keys["fork"]).json()["id"] == fork
            assert http.post(f"{path}/generate", json=TURN, headers=keys["turn"]).json() == turn
            assert http.post(f"{path}/generate", json=stopping, headers=keys["stop"]).json() == stopped
            assert read_stream(http, f"{path}/generate", keys["stream"]) == streamed
            assert history(http, session) == before
            other = http.post("/v1/sessions", json={}, headers=keys["open"])
            assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


def read_stream(http: httpx.Client, path: str, headers: dict[str, str]) -> tuple[str, Any]:
    """The text of a turn's tokens, and its end."""
    with connect_sse(http, "POST", path, json={**TURN, "stream": True}, headers=headers) as source:
        *tokens, end = source.iter_sse()
    return "".join(each.json()["text"] for each in tokens), end.json()


def test_after_a_restart_a_response_is_the_same(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": "tiny-llama", "input": "Hi", "max_output_tokens": 8}
    with serving(tmp_path) as http:
        first = http.post("/v1/responses", json=asked, headers=KEY).json()
        told = stream_response(http, asked)
    with serving(tmp_path) as http:
        assert http.post("/v1/responses", json=asked, headers=KEY).json() == first
        again = stream_response(http, asked)
        assert (again.id, again.output_text) == (told.id, told.output_text)
        assert len(http.get("/v1/sessions").json()["data"]) == 2


def stream_response(http: httpx.Client, asked: dict[str, Any]) -> Response:
    """The response of the last event."""
    with OpenAI(base_url=f"{http.base_url}/v1", api_key="none") as client:
        *_, last = client.responses.create(**asked, stream=True, extra_headers={"Idempotency-Key": "two"})
    assert isinstance(last, ResponseIncompleteEvent)
    return last.response
