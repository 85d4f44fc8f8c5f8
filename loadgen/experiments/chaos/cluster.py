"""What only a cluster has: sessions that an operator moves, and one owner of each."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from client.calls import Call
from client.errors import APIError, DjinnError
from client.transport import AsyncTransport
from loadgen.errors import NotAsMeant
from loadgen.experiments.chaos.agent import SessionAgent
from loadgen.experiments.chaos.findings import Findings
from loadgen.experiments.chaos.hosting import KEYS, MOVER, WATCHER, Cluster, bearer
from loadgen.targets import TargetSpec

AT_ONCE = 8
"""Moves under way at most: one that hangs does not end the others."""
HAS, ELSEWHERE = 200, (404, 421)
"""What a replica answers that has a session, and one that does not."""
SETTLED_S = 120.0
"""How long a session may be between two homes after the run."""
POLL_S, READ_TIMEOUT_S = 0.5, 30.0
ROUTED = "djinn_cluster_requests_total"


async def keep_moving(
    cluster: Cluster, agents: Sequence[SessionAgent], per_second: float, seed: int, findings: Findings
) -> None:
    """Move so many random sessions a second to random replicas, until cancelled."""
    choose = random.Random(f"{seed} moves")
    transport = TargetSpec("cluster", cluster.url, api_key=MOVER).transport()
    under_way: set[asyncio.Task[None]] = set()
    try:
        while True:
            await asyncio.sleep(1 / per_second)
            sessions = [told[0] for agent in agents if (told := agent.told) is not None]
            if sessions and len(under_way) < AT_ONCE:
                there = choose.choice(sorted(cluster.urls))
                task = asyncio.create_task(_move(transport, choose.choice(sessions), there, findings))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
    finally:
        for task in under_way:
            task.cancel()
        await transport.close()


def move_call(session: str, replica: str) -> Call[Any]:
    """`POST /v1/sessions/{id}/move`."""
    return Call("POST", f"/v1/sessions/{session}/move", orjson.loads, json={"replica": replica})


async def _move(transport: AsyncTransport, session: str, there: str, findings: Findings) -> None:
    try:
        await transport.send(move_call(session, there))
    except DjinnError as error:
        findings.refused[(isinstance(error, APIError) and error.code) or type(error).__name__] += 1
    else:
        findings.moved += 1


async def look_at(cluster: Cluster, agents: Sequence[SessionAgent], findings: Findings) -> None:
    """After the run: ask every replica which sessions it has, and how turns came to it. Raises `NotAsMeant`."""
    async with httpx.AsyncClient(timeout=READ_TIMEOUT_S) as http:
        for agent in agents:
            if agent.told is not None:
                key = bearer(KEYS[agent.number % len(KEYS)])
                asked = [
                    _has(http, f"{url}/v1/sessions/{agent.told[0]}", {**key, **cluster.alone(name)})
                    for name, url in cluster.urls.items()
                ]
                findings.owners[sum(await asyncio.gather(*asked))] += 1
        for url in cluster.urls.values():
            with suppress(httpx.TransportError):
                findings.routes += routes((await http.get(f"{url}/metrics", headers=bearer(WATCHER))).text)


async def _has(http: httpx.AsyncClient, url: str, headers: Mapping[str, str]) -> bool:
    deadline = time.monotonic() + SETTLED_S
    while True:
        try:
            status = (await http.get(url, headers=dict(headers))).status_code
        except httpx.TransportError:
            status = 0
        if status == HAS:
            return True
        if status in ELSEWHERE:
            return False
        if time.monotonic() > deadline:
            raise NotAsMeant(f"a replica did not answer whether it has a session: status {status}")
        await asyncio.sleep(POLL_S)


def routes(metrics: str) -> dict[str, int]:
    """How many turns came to their owners in which way, by the text of `/metrics` (docs/reference/cluster.md)."""
    found: dict[str, int] = {}
    for line in metrics.splitlines():
        if line.startswith(f"{ROUTED}{{"):
            (family,) = text_string_to_metric_families(f"{line}\n")
            for sample in family.samples:
                if sample.labels["turn"] == "yes":
                    way = sample.labels["way"]
                    found[way] = found.get(way, 0) + round(sample.value)
    return found
