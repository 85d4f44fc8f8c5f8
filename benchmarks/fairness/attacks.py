"""Clients that try to harm others, honest neighbours, and the process that either runs in, which gives way to others:
`python -m benchmarks.fairness.attacks`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import resource
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save

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


Run = Callable[[Target], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to harm others. `run` goes on until it is cancelled."""

    name: str
    description: str
    run: Run


ATTACKS: dict[str, Attack] = {}
"""By name. Each goes on until it is cancelled, whatever the server answers."""


def attack(name: str, description: str, at_once: int = 0) -> Callable[[Run], Run]:
    """Adds a function to `ATTACKS`; with `at_once` so many of it go on at once, again and again."""

    def add(run: Run) -> Run:
        async def repeated(target: Target) -> None:
            await again_and_again(target, at_once, lambda: run(target))

        ATTACKS[name] = Attack(name, description, repeated if at_once else run)
        return run

    return add


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


LONG_PROMPT = 1000
MOST_STOPS, STOP_CHARACTERS, MOST_STOP_IDS, MOST_BIASES = 16, 1000, 64, 1024


@attack("long-prompts", "16 at once ask for one token after 1,000 new ones", at_once=16)
async def long_prompts(target: Target) -> None:
    prompt = min(LONG_PROMPT, target.model.context - 8)
    await target.alone(prompt, 1)


@attack("logprobs", "8 at once ask for 20 alternatives of each of 800 tokens", at_once=8)
async def log_probabilities(target: Target) -> None:
    answer = min(800, target.model.context // 2)
    await target.alone(16, answer, logprobs=20)


@attack("stop-lists", "8 at once have 16 stop strings of 1,000 characters and 64 stop tokens", at_once=8)
async def stop_lists(target: Target) -> None:
    stops = ["x" * (STOP_CHARACTERS - 2) + f"{number:02}" for number in range(MOST_STOPS)]
    ids = list(range(MOST_STOP_IDS))
    await target.alone(16, 200, stop=stops, stop_token_ids=ids)


@attack("penalties", "16 at once have every penalty, 1,024 biases, top-p, top-k and min-p", at_once=16)
async def penalties(target: Target) -> None:
    biases = {str(token_id): 0.5 for token_id in range(20, 20 + min(MOST_BIASES, target.model.vocabulary - 20))}
    rules = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": biases}
    sampled = {**rules, "temperature": 1.0, "top_p": 0.9, "top_k": 100, "min_p": 0.01}
    await target.alone(64, 200, **sampled)


@attack("cancel-storm", "16 at once begin a stream and leave at its first byte", at_once=16)
async def cancel_storm(target: Target) -> None:
    body = {"model": target.model.name, "prompt": target.token_ids(200), "max_tokens": 200, "stream": True}
    async with target.client.stream("POST", "/v1/completions", json=body) as answer:
        target.answers[str(answer.status_code)] += 1
        async for _ in answer.aiter_bytes():
            return


STEERED_PROMPT = 450


def _sizes(layers: int) -> list[tuple[int, int, int]]:
    """Edits, layers and every how many positions: the most work first."""
    return [
        (edits, min(count, layers), every) for edits, count, every in ((16, 16, 2), (16, 4, 2), (16, 1, 2), (4, 1, 8))
    ]


@attack("breakpoint-work", "16 edits after as many layers as are allowed, at every second position", at_once=4)
async def many_edits(target: Target) -> None:
    session = await target.open()
    try:
        for edits, layers, every in _sizes(target.model.layers):
            body = {
                "layers": list(range(layers)),
                "action": "edit",
                "when": {"every": every},
                "edits": [{"op": "add", "vector": target.vector()} for _ in range(edits)],
            }
            if await target.post(f"{session}/breakpoints", body):
                break
        await target.turn(session, min(STEERED_PROMPT, target.model.context // 2), 4)
    finally:
        await target.request("DELETE", session)


@attack("intervention-journal", "new vectors in every turn, which the journal has to keep", at_once=8)
async def growing_journal(target: Target) -> None:
    session = await target.open()
    for _ in range(20):
        edits = [{"op": "add", "vector": target.vector()} for _ in range(8)]
        if not await target.post(f"{session}/breakpoints", {"layer": 1, "action": "edit", "edits": edits}):
            raise Refused
        await target.turn(session, 8, 4)
        await target.request("DELETE", f"{session}/breakpoints")


@attack("lens", "8 at once pause in every token, read it through the lens and read its activation", at_once=8)
async def lens_at_every_token(target: Target) -> None:
    session = await target.open()
    layer = {"layer": target.model.layers // 2, "action": "pause"}
    await target.post(f"{session}/breakpoints", layer)
    answer: Any = await target.turn(session, 64, 32)
    while answer.get("status") == "paused":
        await target.request("GET", f"{session}/checkpoint/lens", params={"top_k": 20})
        await target.request("GET", f"{session}/checkpoint/activation")
        answer = await target.post(f"{session}/resume", {"until": "next_token"})
    await target.request("DELETE", session)


@attack("captures", "4 at once capture all layers of 450 tokens and read them", at_once=4)
async def captures(target: Target) -> None:
    session = await target.open()
    await target.post(f"{session}/breakpoints", {"layers": list(range(target.model.layers)), "action": "capture"})
    await target.turn(session, min(STEERED_PROMPT, target.model.context // 2), 4)
    await target.request("GET", f"{session}/captures")
    await target.request("DELETE", session)


FLIPPING = 300
FORKS = 24
AWAY_MS = 50


@attack("phase-flips", "300 sessions go and come back every 50 ms")
async def flipping_phases(target: Target) -> None:
    sessions = [await target.open() for _ in range(FLIPPING)]
    for some in (sessions[first : first + 16] for first in range(0, FLIPPING, 16)):
        await asyncio.gather(*(target.turn(session, 32, 1) for session in some))
    order = itertools.cycle(sessions)

    async def flip() -> None:
        session = next(order)
        await target.post(f"{session}/phase", {"phase": "io_wait", "resume_in_ms": AWAY_MS})
        await target.post(f"{session}/phase", {"phase": "ready"})

    await again_and_again(target, 8, flip)


@attack("forks", "4 at once fork forks, and take a turn in each", at_once=4)
async def forks_of_forks(target: Target) -> None:
    session = await target.open()
    await target.turn(session, 200, 1)
    family = [session]
    for _ in range(FORKS):
        child = await target.post(f"{target.chance.choice(family)}/fork")
        if "id" in child:
            family.append(f"/v1/sessions/{child['id']}")
            await target.turn(family[-1], 4, 4)
    for each in family:
        await target.request("DELETE", each)


@attack("session-flood", "16 at once open sessions and never close one")
async def sessions_without_end(target: Target) -> None:
    await again_and_again(target, 16, target.open)


FILE = {"content-type": "application/octet-stream"}
HISTORY = 800
HOSTILE_SIZES = (0, 1, 2**31, 2**53, 2**63 - 1, 2**64 - 1)


async def _long_session(target: Target) -> str:
    session = await target.open()
    await target.turn(session, min(HISTORY, target.model.context - 16), 1)
    return session


@attack("exports", "8 at once export a session of 800 tokens again and again")
async def exports(target: Target) -> None:
    session = await _long_session(target)
    await again_and_again(target, 8, lambda: target.request("GET", f"{session}/export"))


@attack("damaged-imports", "8 at once import files with flipped bits and hostile sizes")
async def damaged_imports(target: Target) -> None:
    session = await _long_session(target)
    whole = (await target.request("GET", f"{session}/export")).content

    async def damage() -> None:
        file = bytearray(whole)
        if target.chance.random() < 0.5:  # the header's own length
            file[:8] = struct.pack("<Q", target.chance.choice(HOSTILE_SIZES))
        for _ in range(target.chance.randint(1, 64)):
            file[target.chance.randrange(len(file))] ^= 1 << target.chance.randrange(8)
        await target.request("POST", "/v1/sessions/import", content=bytes(file), headers=FILE)

    await again_and_again(target, 8, damage)


@attack("vectors", "8 at once upload vectors under new names and list them all", at_once=8)
async def vectors(target: Target) -> None:
    name = f"v{target.chance.randrange(1 << 30)}"
    content = save({"vector": np.asarray(target.vector(), np.float32)})
    await target.request("POST", "/v1/vectors", params={"name": name}, content=content, headers=FILE)
    await target.request("GET", "/v1/vectors")


TEXT_BYTES = 8_000_000
MOST_IDS = 131_072


@attack("long-texts", "4 at once have 8 MB tokenized and 131,072 tokens made text")
async def long_texts(target: Target) -> None:
    text = json.dumps({"prompt": "word " * (TEXT_BYTES // 5)}).encode()
    ids = json.dumps({"tokens": target.token_ids(1) * MOST_IDS}).encode()
    bodies = itertools.cycle((("/tokenize", text), ("/detokenize", ids)))

    async def send() -> None:
        path, body = next(bodies)
        await target.request("POST", path, content=body, headers={"content-type": "application/json"})

    await again_and_again(target, 4, send)


def _bombs() -> list[dict[str, object]]:
    deep: dict[str, object] = {"type": "string"}
    for number in range(10):
        deep = {"type": "object", "properties": {f"a{number}": deep, "b": deep}, "additionalProperties": False}
    wide = {f"key{number}": {"type": "integer"} for number in range(2000)}
    many = [f"{number:032x}" for number in range(1000)]
    return [
        {"regex": "(a|aa|aaa)*(b|bb)*" * 40},
        {"regex": "((a?){200}a{200}){20}"},
        {"regex": "[a-z]{1,1000}[0-9]{1,1000}x"},
        {"json": {"type": "object", "properties": wide, "required": list(wide)}},
        {"json": {"enum": many}},
        {"json": {"type": "array", "items": {"anyOf": [{"const": each} for each in many]}, "maxItems": 1000}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}},
        {"json": deep},
        {"json": {"type": "string", "pattern": "(x+x+)+y"}},
    ]


@attack("grammar-bombs", "8 at once send regular expressions and schemas that explode")
async def grammar_bombs(target: Target) -> None:
    bombs, numbers = _bombs(), itertools.count()

    async def send() -> None:
        number = next(numbers)
        bomb = {**bombs[number % len(bombs)]}
        if "regex" in bomb:  # another text each time, so that none is known already
            bomb["regex"] = f"{bomb['regex']}z{{0,{number % 900 + 1}}}"
        await target.alone(8, 32, structured_outputs=bomb)

    await again_and_again(target, 8, send)


@attack("json-bombs", "4 at once send bodies of megabytes: deep, wide, with endless numbers")
async def deep_bodies(target: Target) -> None:
    bodies = itertools.cycle(
        (
            b"[" * 4_000_000,
            b'{"metadata":' * 90 + b"{}" + b"}" * 90,
            b'{"token_ids":[' + b"1," * 2_000_000 + b"1]}",
            b'{"max_tokens":' + b"9" * 7_000_000 + b"}",
            b'{"' + b"k" * 7_000_000 + b'":1}',
            b"{" + b",".join(b'"k%d":1' % number for number in range(400_000)) + b"}",
        )
    )
    session = await target.open()

    async def send() -> None:
        headers = {"content-type": "application/json"}
        await target.request("POST", f"{session}/generate", content=next(bodies), headers=headers)

    await again_and_again(target, 4, send)


HALF_HEADERS, IDLE, UNREAD = 3000, 500, 200
BODY_BYTES = 1_500_000_000
PART = bytes(1 << 20)

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _talk(target: Target, talk: Talk) -> None:
    """One connection."""
    url = target.client.base_url
    try:
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=1 << 12)
    except OSError as error:
        target.answers[type(error).__name__] += 1
        return
    try:
        await talk(reader, writer)
    except OSError as error:
        target.answers[type(error).__name__] += 1
    finally:
        writer.close()


async def _keep(target: Target, count: int, talk: Talk) -> None:
    """So many connections, each of them made again when the server has ended it."""

    async def repeat() -> None:
        while True:
            await _talk(target, talk)
            await asyncio.sleep(0.1)

    await asyncio.gather(*(repeat() for _ in range(count)))


def _head(target: Target, request: str, *lines: str) -> bytes:
    host = f"{target.client.base_url.host}:{target.client.base_url.port}"
    return "\r\n".join([request, f"Host: {host}", f"Authorization: Bearer {target.key}", *lines, "", ""]).encode()


@attack("half-headers", "3,000 connections send half a header")
async def half_headers(target: Target) -> None:
    async def say_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /v1/sessions HTTP/1.1\r\nHost: ")
        await _until_ended(target, reader)

    await _keep(target, HALF_HEADERS, say_half)


@attack("idle-connections", "500 connections ask once and stay")
async def idle_connections(target: Target) -> None:
    async def ask_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_head(target, "GET /health HTTP/1.1"))
        await _until_ended(target, reader)

    await _keep(target, IDLE, ask_once)


@attack("unread-answers", "200 connections ask for long streams and read nothing")
async def unread_answers(target: Target) -> None:
    tokens = min(800, target.model.context - 32)
    body = {"model": target.model.name, "prompt": target.token_ids(8), "max_tokens": tokens, "stream": True}
    content = json.dumps({**body, "ignore_eos": True, "logprobs": 5}).encode()

    async def ask_and_never_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = ("Content-Type: application/json", f"Content-Length: {len(content)}")
        writer.write(_head(target, "POST /v1/completions HTTP/1.1", *lines) + content)
        await writer.drain()
        first = await reader.read(16)
        target.answers[first[9:12].decode(errors="replace") or "ended"] += 1
        await asyncio.sleep(3600)

    await _keep(target, UNREAD, ask_and_never_read)


@attack("get-with-body", "4 connections send a GET with a body of 1.5 GB")
async def get_with_a_body(target: Target) -> None:
    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_head(target, "GET /v1/sessions/import HTTP/1.1", f"Content-Length: {BODY_BYTES}"))
        answer = asyncio.create_task(_until_ended(target, reader))
        try:
            for _ in range(BODY_BYTES // len(PART)):
                writer.write(PART)
                await writer.drain()
        finally:
            answer.cancel()

    await _keep(target, 4, send)


async def _until_ended(target: Target, reader: asyncio.StreamReader) -> None:
    while part := await reader.read(4096):
        if part.startswith(b"HTTP/"):
            target.answers[part[9:12].decode(errors="replace")] += 1
    target.answers["ended"] += 1


HONEST_PROMPT, HONEST_ANSWER, TURNS = 128, 32, 4


def honest(count: int) -> Run:
    """`count` agents at once: sessions of a few ordinary turns, one after the other."""

    async def run(target: Target) -> None:
        async def converse() -> None:
            session = await target.open()
            for _ in range(TURNS):
                await target.turn(session, HONEST_PROMPT, HONEST_ANSWER)
            await target.request("DELETE", session)

        await again_and_again(target, count, converse)

    return run


POLITE = 19
"""The client's own work must not take cores from the server: the highest niceness."""
TIMEOUT_S = 60.0


async def attack_for(url: str, key: str, name: str, model: Model, seconds: float) -> Target:
    """Attack for so long. `honest-N` is N honest neighbours."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits) as client:
        target = Target(client, key, model, random.Random(1))
        chosen = honest(int(name.removeprefix("honest-"))) if name.startswith("honest-") else ATTACKS[name].run
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(chosen(target), seconds)
    return target


def main() -> int:
    """Attack as the command line says, and print what became of it as JSON."""
    parser = argparse.ArgumentParser()
    for name in ("url", "key", "name", "model"):
        parser.add_argument(name)
    parser.add_argument("seconds", type=float)
    arguments = parser.parse_args()
    os.nice(POLITE)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    model = Model(**json.loads(arguments.model))
    target = asyncio.run(attack_for(arguments.url, arguments.key, arguments.name, model, arguments.seconds))
    print(json.dumps({"answers": target.answers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
