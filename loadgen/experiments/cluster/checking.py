"""Whether a cluster has kept what it has told, asked after a run."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import httpx
from prometheus_client.parser import text_string_to_metric_families

from client.calls import get_history
from client.transport import AsyncTransport
from loadgen.errors import NotAsMeant
from loadgen.experiments.cluster.agent import ClusterAgent
from loadgen.experiments.cluster.findings import Findings, Routing, WrongTurn
from loadgen.experiments.cluster.hashing import HashAgent
from loadgen.experiments.cluster.hosting import Cluster
from loadgen.experiments.cluster.retrying import retried
from loadgen.experiments.cluster.twin import Answers

ELSEWHERE = (404, 421)
"""What a replica answers that does not have a session."""
HAS = 200
SETTLED_S = 120.0
"""How long a session may be between two homes after the run."""
POLL_S = 0.5
READ_TIMEOUT_S = 30.0
ROUTED = "djinn_cluster_requests_total"


def compare(agents: Sequence[ClusterAgent | HashAgent], answers: Answers, findings: Findings) -> None:
    """Hold the tokens of all turns that were told beside those of the single server."""
    for agent, right in zip(agents, answers, strict=True):
        for turn, ((_, made), expected) in enumerate(zip(agent.turns, right, strict=False)):
            findings.compared += 1
            findings.tokens += len(made)
            if made != expected:
                first = next((i for i, pair in enumerate(zip(made, expected, strict=False)) if pair[0] != pair[1]), 0)
                findings.wrong.append(WrongTurn(agent.number, turn, f"token {first} of {len(made)} is another one"))


async def check_histories(transport: AsyncTransport, agents: Sequence[ClusterAgent], findings: Findings) -> None:
    """Ask the cluster for the history of every session. Raises `DjinnError`, `TimeoutError`."""
    for agent in agents:
        if agent.session is None:
            continue
        ask = partial(transport.send, get_history(agent.session.id, pieces=False))
        async with asyncio.timeout(SETTLED_S):
            found = (await retried(Counter(), ask)).token_ids
        known = agent.history
        if found[: len(known)] != known:
            what = f"the session has {len(found)} tokens, and not the {len(known)} that were told"
            findings.lost.append(WrongTurn(agent.number, None, what))


async def check_owners(cluster: Cluster, agents: Sequence[ClusterAgent], findings: Findings) -> None:
    """Ask every replica for every session. Raises `NotAsMeant` for one that cannot say."""
    counts: Counter[int] = Counter()
    async with httpx.AsyncClient(timeout=READ_TIMEOUT_S) as http:
        for agent in agents:
            if agent.session is not None:
                asked = [_has(http, url, cluster.alone(name), agent.session.id) for name, url in cluster.urls.items()]
                counts[sum(await asyncio.gather(*asked))] += 1
    findings.owners = dict(sorted(counts.items()))


async def _has(http: httpx.AsyncClient, url: str, alone: Mapping[str, str], session: str) -> bool:
    deadline = time.monotonic() + SETTLED_S
    while True:
        try:
            status = (await http.get(f"{url}/v1/sessions/{session}", headers=alone)).status_code
        except httpx.TransportError:
            status = 0
        if status == HAS:
            return True
        if status in ELSEWHERE:
            return False
        if time.monotonic() > deadline:
            raise NotAsMeant(f"a replica did not answer whether it has a session: status {status}")
        await asyncio.sleep(POLL_S)


async def routing_of(cluster: Cluster) -> Routing:
    """How turns have come to their owners, by the metrics of all replicas since these began."""
    async with httpx.AsyncClient(timeout=READ_TIMEOUT_S) as http:
        texts = [(await http.get(f"{url}/metrics")).text for url in cluster.urls.values()]
    return read_routing("\n".join(texts))


def read_routing(metrics: str) -> Routing:
    """The same, from the texts of `/metrics`."""
    lines = (line for line in metrics.splitlines() if line.startswith(f"{ROUTED}{{"))
    counts = Counter[str]()
    for line in lines:
        (family,) = text_string_to_metric_families(f"{line}\n")
        for sample in family.samples:
            counts[sample.labels["way"]] += round(sample.value) if sample.labels["turn"] == "yes" else 0
    counts["owner"] = counts.pop("here") + counts.pop("hop")
    return Routing(**counts)
