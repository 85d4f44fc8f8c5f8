"""One server after the other, each with a victim and a neighbour. The victim is the client whose waits count: it takes
short turns, streamed, one after the other. What an attack costs it is held against what an honest neighbour of the
attack's size costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from httpx_sse import aconnect_sse

from benchmarks.fairness.attacks import ATTACKS, Model
from loadgen.peers.djinn import djinn_launch
from loadgen.processes.process import ServerFailedError, free_port, starting_server
from loadgen.sampling.sampler import process_use

MOST_RATIO = 2.0
MOST_GROWTH_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds, the 95th percentile over the turns."""

    first_s: float
    token_s: float

    @classmethod
    def of(cls, firsts: Sequence[float], tokens: Sequence[float]) -> Waits:
        """Of at least one turn."""
        return cls(*(float(np.percentile(values, 95)) for values in (firsts, tokens)))


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Honest ones, `count` at once: how many tokens a second the server computed for them, and the victim's waits."""

    count: int
    tokens_per_s: float
    waits: Waits


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an attack did in so many turns of the victim. `grown_bytes` of memory, `wrong` turns with other tokens."""

    name: str
    description: str
    turns: int
    waits: Waits
    tokens_per_s: float
    grown_bytes: int
    answers: dict[str, int]
    wrong: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ratios of the victim's waits to those beside honest neighbours with the same number of tokens."""

    first_ratio: float
    token_ratio: float
    is_kept: bool


def beside_honest(neighbours: Sequence[Neighbour], tokens_per_s: float) -> Waits:
    """The victim's waits beside honest neighbours with so many tokens a second: between those that were measured, and
    never beside fewer than the fewest.
    """
    known = sorted(neighbours, key=lambda each: each.tokens_per_s)
    rates = [each.tokens_per_s for each in known]

    def at(values: Sequence[float]) -> float:
        return float(np.interp(tokens_per_s, rates, values))

    return Waits(at([each.waits.first_s for each in known]), at([each.waits.token_s for each in known]))


def judge(outcome: Outcome, neighbours: Sequence[Neighbour]) -> Verdict:
    """Whether the attack harms the victim no more than it may, its memory and its tokens included."""
    fair = beside_honest(neighbours, outcome.tokens_per_s)
    first, token = outcome.waits.first_s / fair.first_s, outcome.waits.token_s / fair.token_s
    is_whole = not outcome.wrong and not outcome.error and outcome.grown_bytes <= MOST_GROWTH_BYTES
    return Verdict(first, token, is_whole and max(first, token) <= MOST_RATIO)


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


VICTIM_KEY, NEIGHBOUR, WATCHER = "key-of-the-victim", "key-of-the-neighbour", "key-of-the-watcher"
ROLES = {VICTIM_KEY: "user", NEIGHBOUR: "user", WATCHER: "metrics"}
KV_DEVICE_BYTES, KV_HOST_BYTES = 64 << 20, 256 << 20
HONEST = (1, 4, 16)
LEAD_S = 2.0
"""The neighbour has begun when the victim is measured."""
SAMPLE_S = 0.25
GRACE_S = 20.0
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long the victim takes turns beside each neighbour, and which attacks there are."""

    seconds: float
    attacks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """What was seen beside one neighbour, or beside nobody. `answers` are the neighbour's, and `tokens_per_s` those
    that the server computed for it, whether or not it was told them.
    """

    turns: list[Turn]
    answers: dict[str, int]
    tokens_per_s: float
    grown_bytes: int
    error: str = ""

    @property
    def waits(self) -> Waits:
        """The victim's."""
        return Waits.of([turn.first_s for turn in self.turns], [turn.token_s for turn in self.turns])


@contextmanager
def served(model: Path) -> Iterator[tuple[str, int]]:
    """A fresh server with two users and a state folder of its own: its URL and its process."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "--model": str(model),
            "--port": str(port),
            "--tenants": str(_write_tenants(Path(folder))),
            "--state-dir": f"{folder}/state",
            "--kv-device": str(KV_DEVICE_BYTES),
            "--kv-host": str(KV_HOST_BYTES),
            "--kv-disk": "1GiB",
        }
        launch = djinn_launch(flags)
        with starting_server(launch.command, {**os.environ, **launch.environment}, None) as process:
            _wait_until_ready(process, url)
            yield url, process.pid


def _write_tenants(folder: Path) -> Path:
    tenants = [
        {"name": key, "role": role, "keys": [{"sha256": hashlib.sha256(key.encode()).hexdigest()}]}
        for key, role in ROLES.items()
    ]
    path = folder / "tenants.json"
    path.write_text(json.dumps({"tenants": tenants}))
    return path


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Raises ServerFailedError."""
    headers, deadline = {"authorization": f"Bearer {VICTIM_KEY}"}, time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", headers=headers).is_success:
                return
        time.sleep(0.1)
    raise ServerFailedError("the server did not start")


def play(model: Path, name: str | None, seconds: float) -> Scene:
    """The victim beside the neighbour `name`, on a server of their own; None: beside nobody."""
    with served(model) as (url, pid):
        return asyncio.run(_play(url, pid, name, seconds))


def neighbour_of(name: str, count: int, scene: Scene) -> Neighbour:
    """Honest ones. Raises ServerFailedError if the server could not serve the victim beside them."""
    if scene.error:
        raise ServerFailedError(f"beside {name}: {scene.error}")
    return Neighbour(count, scene.tokens_per_s, scene.waits)


def outcome_of(name: str, scene: Scene, right: list[Turn]) -> Outcome:
    """What an attack did; `right` are the victim's turns beside nobody."""
    wrong = sum(
        not turn.error and turn.token_ids != expected.token_ids
        for turn, expected in zip(scene.turns, right, strict=False)
    )
    does, turns, rate = ATTACKS[name].description, len(scene.turns), scene.tokens_per_s
    return Outcome(name, does, turns, scene.waits, rate, scene.grown_bytes, scene.answers, wrong, scene.error)


async def _play(url: str, pid: int, name: str | None, seconds: float) -> Scene:
    headers = {"authorization": f"Bearer {VICTIM_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0) as client:
        model = await _describe(client)
        await Victim(client, model.vocabulary).run(0.0)
        before = _memory(pid)
        worker = None if name is None else await _start(url, name, model, seconds + LEAD_S)
        victim, peak = Victim(client, model.vocabulary), asyncio.create_task(_watch(pid))
        if worker is not None:
            await asyncio.sleep(LEAD_S)
        counted, began = await _computed(url), time.perf_counter()
        await victim.run(seconds)
        counted_then, lasted = await _computed(url), time.perf_counter() - began
        whole = 0 if counted is None or counted_then is None else counted_then - counted
        found = {} if worker is None else await _end(worker)
        peak.cancel()
        grown = max(0, await _peak(peak) - before - KV_DEVICE_BYTES - KV_HOST_BYTES)
        error = next((turn.error for turn in victim.turns if turn.error), "") or await _failure(client)
    rate, error = max(0, whole - victim.computed) / lasted, error or found.get("error", "")
    return Scene(victim.turns, found.get("answers", {}), rate, grown, error)


async def _describe(client: httpx.AsyncClient) -> Model:
    found = (await client.get("/v1/models")).raise_for_status().json()["data"][0]
    counted = (await client.post("/tokenize", json={"prompt": "a"})).raise_for_status().json()
    vocabulary = max(400, *counted["tokens"])  # no route tells its size; every model here has that many
    return Model(found["id"], vocabulary, found["hidden_size"], found["layers"], found["max_model_len"])


async def _computed(url: str) -> int | None:
    """Tokens that the server has computed for all; None if it does not say."""
    async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {WATCHER}"}, timeout=60.0) as client:
        try:
            lines = (await client.get("/metrics")).raise_for_status().text.splitlines()
        except httpx.HTTPError:
            return None  # `_failure` tells why
    return int(float(next(line for line in lines if line.startswith("djinn_step_tokens_total ")).split()[1]))


async def _start(url: str, name: str, model: Model, seconds: float) -> asyncio.subprocess.Process:
    arguments = [url, NEIGHBOUR, name, json.dumps(asdict(model)), str(seconds)]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.fairness.attacks", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


async def _end(worker: asyncio.subprocess.Process) -> dict[str, Any]:
    try:
        out, err = await asyncio.wait_for(worker.communicate(), GRACE_S)
    except TimeoutError:
        worker.kill()
        await worker.communicate()
        return {}
    if worker.returncode:
        return {"error": f"the attacker failed: {err.decode()[-500:]}"}
    found: dict[str, Any] = json.loads(out)
    return found


async def _failure(client: httpx.AsyncClient) -> str:
    """Why the server takes no work any more; empty if it does."""
    try:
        answer = await client.get("/ready")
    except httpx.HTTPError as error:
        return f"the server does not answer: {type(error).__name__}"
    return "" if answer.is_success else f"/ready answers {answer.status_code}: {answer.text[:200]}"


def _memory(pid: int) -> int:
    use = process_use(pid)
    return 0 if use is None else use.rss_bytes


async def _watch(pid: int) -> int:
    """The most memory until it is cancelled."""
    peak = 0
    try:
        while True:
            peak = max(peak, await asyncio.to_thread(_memory, pid))
            await asyncio.sleep(SAMPLE_S)
    except asyncio.CancelledError:
        return peak


async def _peak(watching: asyncio.Task[int]) -> int:
    return await watching
