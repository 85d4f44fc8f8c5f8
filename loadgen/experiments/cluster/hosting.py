"""A cluster of replicas that the load generator starts, and the single server that it is held against."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import psutil

from loadgen.errors import NotAsMeant
from loadgen.experiments.cluster.plan import ClusterPlan, Router
from loadgen.experiments.soak.hosting import HostedServer
from loadgen.peers.base import SERVED_NAME
from loadgen.peers.djinn import PACKAGES, djinn_launch
from loadgen.processes.launch import ROOT, Launch, flatten, without_folders
from loadgen.processes.process import START_TIMEOUT_S, free_port
from loadgen.results.inputs import Server
from loadgen.results.origin import versions
from loadgen.targets import TargetSpec

READ_TIMEOUT_S = 5.0
POLL_S = 0.1
NAME = "--replica"
"""Comes before its name in the command line of a replica."""
STAY = ("--no-balance", "--drain-to", "disk")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
"""Of a replica that has one core."""


class Cluster(HostedServer):
    """A `djinn cluster serve` whose replicas are its children."""

    def __init__(self, replicas: int, launch: Launch, port: int, state: Path, timeout_s: float) -> None:
        super().__init__(f"cluster-{replicas}", launch, port, state)
        self.spec = TargetSpec(f"{replicas}", self.url, timeout_s=timeout_s)
        self._state = state
        self._urls = dict[str, str]()

    @property
    def urls(self) -> dict[str, str]:
        """Where each replica listens by itself, by name: its keeper has told it."""
        found = dict[str, str]()
        for name, process in self.replicas().items():
            with suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                found[name] = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
        self._urls.update(found)  # one that is being started again comes back there
        return dict(self._urls)

    def alone(self, name: str) -> dict[str, str]:
        """Headers by which the replica of that name answers what is its own, and sends nothing on: those of another
        replica, which has the cluster's key.
        """
        key = (self._state / "cluster" / "cluster.key").read_bytes().strip()
        proof = hmac.new(key, digestmod=hashlib.sha256)
        for part in (b"hop", b"loadgen", name.encode()):
            proof.update(len(part).to_bytes(8, "little") + part)
        return {"Djinn-Hop": f"loadgen {proof.hexdigest()}"}

    def replicas(self) -> dict[str, psutil.Process]:
        """The processes of the replicas that run, by name. One that stands by is younger than the one that serves."""
        found: dict[str, psutil.Process] = {}
        with suppress(psutil.NoSuchProcess):
            for child in sorted(psutil.Process(self.pid).children(), key=psutil.Process.create_time):
                if (name := _name_of(child)) is not None:
                    found.setdefault(name, child)
        return found

    async def until_whole(self) -> None:
        """Wait until all replicas take new work. Raises `NotAsMeant` if that takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while any(state != "ready" for state in (await self.states() or {"": "away"}).values()):
            if time.monotonic() > deadline:
                raise NotAsMeant(f"not all replicas were ready within {START_TIMEOUT_S:.0f} s: {await self.states()}")
            await asyncio.sleep(POLL_S)

    async def states(self) -> dict[str, str]:
        """What each replica says of itself."""
        found = dict[str, str]()
        async with httpx.AsyncClient(timeout=READ_TIMEOUT_S) as http:
            for name, url in self.urls.items():
                try:
                    answer = await http.get(f"{url}/ready")
                except httpx.TransportError:
                    found[name] = "away"
                else:
                    found[name] = "ready" if answer.is_success else "refuses"
        return found

    async def serves(self, name: str) -> bool:
        """Whether a replica takes new work, and the others know it."""
        if (await self.states()).get(name) != "ready":
            return False
        async with httpx.AsyncClient(timeout=READ_TIMEOUT_S) as http:
            lists = [await http.get(f"{url}/v1/sessions") for url in self.urls.values()]
        return all(each.is_success and "missing" not in each.json() for each in lists)

    def shown(self, model: str) -> Server:
        """What may be published of it."""
        launch = without_folders(self.launch, [ROOT, Path(model).parent, self._state.parent])
        return Server(f"{self.spec.name}", self.url, "djinn", None, launch.as_words(), versions(PACKAGES))


def cluster_of(
    replicas: int,
    router: Router,
    model: str,
    room: Mapping[str, str],
    state: Path,
    plan: ClusterPlan,
    *,
    one_core: bool,
) -> Cluster:
    """A cluster that is not started yet, with `room` for KV in each replica. Sessions that a hash must find again stay
    where they are.
    """
    port = free_port()
    flags = {"--replicas": f"{replicas}", **_flags(model, port), **room}
    words = [sys.executable, "-P", "-m", "app", "cluster", "serve", *flatten({**flags, "--state-dir": str(state)})]
    words += STAY if router is Router.HASH else ()
    words += ["--standby"] if plan.standby else ()
    return Cluster(replicas, Launch(words, ONE_THREAD if one_core else {}), port, state, plan.turn_timeout)


@asynccontextmanager
async def single(model: str, room: Mapping[str, str]) -> AsyncIterator[HostedServer]:
    """One server without replicas or state, within the block. Raises `ServerFailedError`."""
    port = free_port()
    server = HostedServer(
        "cluster-twin", djinn_launch({**_flags(model, port), **room, "--state-dir": "none"}), port, None
    )
    async with started(server):
        yield server


@asynccontextmanager
async def started(server: HostedServer) -> AsyncIterator[None]:
    """It runs within the block. Raises `ServerFailedError`."""
    try:
        await server.start()
        yield
    finally:
        await asyncio.to_thread(server.stop)


def _name_of(process: psutil.Process) -> str | None:
    """Of the replica that the process is; None if it is none, or has ended."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return None
    return words[words.index(NAME) + 1] if NAME in words else None


def _flags(model: str, port: int) -> dict[str, str]:
    """In float32 a CPU gives a session the same tokens beside others as alone."""
    return {"--model": model, "--served-model-name": SERVED_NAME, "--dtype": "float32", "--port": f"{port}"}
