"""The two servers: one, or a cluster, that can be killed and started again in its place, and its twin."""

import asyncio
import hashlib
import hmac
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import psutil

from loadgen.errors import NotAsMeant
from loadgen.experiments.chaos.plan import ChaosPlan, Notes
from loadgen.peers.base import SERVED_NAME
from loadgen.peers.djinn import PACKAGES, djinn_launch
from loadgen.peers.serving import log_file
from loadgen.processes.launch import ROOT, Launch, flatten, without_folders
from loadgen.processes.process import START_TIMEOUT_S, ServerFailedError, free_port, log_tail, spawn, stop_server
from loadgen.report.origin import Server, versions
from loadgen.report.tables import MIB, Row
from loadgen.sampling.sampler import process_use

KEYS = ("chaos-one", "chaos-two")
"""Of the agents' tenants."""
WATCHER = "chaos-watcher"
"""The key that reads `/metrics`."""
MOVER = "chaos-mover"
"""The key that moves sessions."""
ENGINE = "app.engine_process"
"""Stands in the command line of the engine's process."""
REPLICA = "--replica"
"""Comes before its name in the command line of a replica."""
POLL_S = 0.05
READ_TIMEOUT_S = 5.0
ORPHANED_S = 20.0
"""How long an engine may outlive its server."""
END_S = 60.0
"""A server that is told to end lets turns run for 30 s, and answers for 5 s."""


class HostedServer:
    """A `djinn serve` on one port, and the process that it is at the moment."""

    def __init__(self, name: str, launch: Launch, port: int, state: Path | None) -> None:
        self.launch = launch
        self.url = f"http://127.0.0.1:{port}"
        self.state = state
        self.log = log_file(f"{name}-{port}")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process, which may have ended."""
        assert self._process is not None
        return self._process.pid

    @property
    def urls(self) -> dict[str, str]:
        """Where each replica listens by itself, by name; the server alone has no name."""
        return {"": self.url}

    async def start(self) -> None:
        """Start it and wait until it is ready. Raises `ServerFailedError`."""
        with self.log.open("ab") as output:
            self._process = spawn(self.launch.command, self.launch.environment, output)
        await self.until_ready()

    async def until_ready(self) -> None:
        """Wait until it takes new work. Raises `ServerFailedError` if it ends before that, or takes too long."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await self.is_ready():
            if self._process.poll() is not None:
                raise self._failed(f"the server ended with status {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self._failed(f"the server was not ready within {START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def is_ready(self) -> bool:
        """Whether it takes new work."""
        try:
            async with httpx.AsyncClient(timeout=READ_TIMEOUT_S, headers=bearer(KEYS[0])) as http:
                return (await http.get(f"{self.url}/ready")).is_success
        except httpx.TransportError:
            return False

    def engine(self) -> psutil.Process | None:
        """The process of its engine; None while there is none. Raises `psutil.NoSuchProcess` without a server."""
        for child in psutil.Process(self.pid).children():
            try:
                if ENGINE in child.cmdline():
                    return child
            except psutil.NoSuchProcess:
                continue
        return None

    def kill(self) -> None:
        """`kill -9`. Raises `NotAsMeant` if a process of it lives on."""
        assert self._process is not None
        family = psutil.Process(self.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        _, alive = psutil.wait_procs(family, ORPHANED_S)
        for process in alive:
            process.kill()
        if alive:
            raise NotAsMeant(f"{len(alive)} processes outlived their server by {ORPHANED_S:.0f} s")

    def end(self) -> None:
        """SIGTERM. Raises `NotAsMeant` unless it ends in time, and well."""
        assert self._process is not None
        self._process.terminate()
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            status = None
        self.stop()
        if status is None:
            raise NotAsMeant(f"the server did not end within {END_S:.0f} s of SIGTERM")
        if status:
            raise NotAsMeant(f"the server ended with status {status} after SIGTERM")

    def stop(self) -> None:
        """End whatever is left of it."""
        if self._process is not None:
            stop_server(self._process.pid)
            self._process.wait()

    def _failed(self, message: str) -> ServerFailedError:
        with self.log.open("rb") as output:
            return ServerFailedError(f"{message}\n{log_tail(output)}")


class Cluster(HostedServer):
    """A `djinn cluster serve` whose replicas are its children."""

    _urls: dict[str, str] | None = None

    @property
    def urls(self) -> dict[str, str]:
        """Their keeper has told it; one that is being started again comes back there."""
        self._urls = self._urls or {}
        for name, process in self.replicas().items():
            with suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                self._urls[name] = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
        return dict(self._urls)

    def alone(self, name: str) -> dict[str, str]:
        """Headers by which the replica of that name answers what is its own, and sends nothing on: those of another
        replica, which has the cluster's key.
        """
        assert self.state is not None
        key = (self.state / "cluster" / "cluster.key").read_bytes().strip()
        proof = hmac.new(key, digestmod=hashlib.sha256)
        for part in (b"hop", b"loadgen", name.encode()):
            proof.update(len(part).to_bytes(8, "little") + part)
        return {"Djinn-Hop": f"loadgen {proof.hexdigest()}"}

    def replicas(self) -> dict[str, psutil.Process]:
        """The processes of the replicas that run, by name. One that stands by is younger than the one that serves."""
        found: dict[str, psutil.Process] = {}
        with suppress(psutil.NoSuchProcess):
            for child in sorted(psutil.Process(self.pid).children(), key=psutil.Process.create_time):
                with suppress(psutil.NoSuchProcess):
                    words = child.cmdline()
                    if REPLICA in words:
                        found.setdefault(words[words.index(REPLICA) + 1], child)
        return found

    async def is_ready(self) -> bool:
        """Whether all replicas take new work, and know each other."""
        assert self._process is not None
        wanted = int(self.launch.command[self.launch.command.index("--replicas") + 1])
        try:
            async with httpx.AsyncClient(timeout=READ_TIMEOUT_S, headers=bearer(KEYS[0])) as http:
                ready = [(await http.get(f"{url}/ready")).is_success for url in self.urls.values()]
                lists = [await http.get(f"{url}/v1/sessions") for url in self.urls.values()]
        except httpx.TransportError:
            return False
        whole = all(each.is_success and "missing" not in each.json() for each in lists)
        return len(ready) == wanted and all(ready) and whole


def bearer(key: str) -> dict[str, str]:
    """The header that has the key."""
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def both(plan: ChaosPlan, model: str, folder: Path) -> AsyncIterator[tuple[HostedServer, HostedServer]]:
    """The server that faults come to, which keeps its state in `folder`, and its twin. Raises `ServerFailedError`."""
    servers = _server(plan, model, folder), _twin(plan, model)
    try:
        for server in servers:
            await server.start()
        yield servers
    finally:
        for server in servers:
            await asyncio.to_thread(server.stop)


def _server(plan: ChaosPlan, model: str, folder: Path) -> HostedServer:
    """It has room for half of the sessions on the device and a quarter on the host, so that KV also goes to disk."""
    port = free_port()
    room = {
        "--kv-device": f"{max(2, plan.agents // 2)}x{plan.context}",
        "--kv-host": f"{max(1, plan.agents // 4)}x{plan.context}",
        "--kv-disk": f"{2 * plan.agents}x{plan.context}",
    }
    tenants = write_tenants(folder.with_name(f"{folder.name}-tenants.json"))
    flags = {**_flags(model, port), **room, "--state-dir": str(folder), "--tenants": str(tenants)}
    if not plan.replicas:
        return HostedServer("chaos", djinn_launch(flags), port, folder)
    words = [sys.executable, "-P", "-m", "app", "cluster", "serve", "--replicas", f"{plan.replicas}", *flatten(flags)]
    return Cluster("chaos", Launch([*words, *(["--standby"] if plan.standby else [])]), port, folder)


def write_tenants(path: Path) -> Path:
    """A file that names a tenant for each of the keys."""
    roles = {**dict.fromkeys(KEYS, "user"), WATCHER: "metrics", MOVER: "operator"}
    tenants = [
        {"name": key, "role": role, "keys": [{"sha256": hashlib.sha256(key.encode()).hexdigest()}]}
        for key, role in roles.items()
    ]
    path.write_text(json.dumps({"tenants": tenants}))
    return path


def _twin(plan: ChaosPlan, model: str) -> HostedServer:
    port = free_port()
    room = {"--kv-device": f"{4 * plan.agents}x{plan.context}", "--kv-host": f"1x{plan.context}"}
    launch = djinn_launch({**_flags(model, port), **room, "--state-dir": "none"})
    return HostedServer("chaos-twin", launch, port, None)


def _flags(model: str, port: int) -> dict[str, str]:
    """In float32 a CPU gives a session the same tokens beside others as alone."""
    return {"--model": model, "--served-model-name": SERVED_NAME, "--dtype": "float32", "--port": str(port)}


def shown(server: HostedServer, model: str, folder: Path) -> Server:
    """What may be published of the server, whose state was below `folder`."""
    launch = without_folders(server.launch, [ROOT, Path(model).parent, folder])
    return Server("djinn", server.url, "djinn", None, launch.as_words(), versions(PACKAGES))


PERIOD_S = 1.0
SAMPLE_TIMEOUT_S = 2.0
SESSIONS = re.compile(r"^djinn_sessions (\d+)", re.MULTILINE)


async def keep_sampling(server: HostedServer, notes: Notes) -> None:
    """A sample every second, until cancelled. None is taken while there is no server."""
    async with httpx.AsyncClient(timeout=SAMPLE_TIMEOUT_S, headers=bearer(WATCHER)) as http:
        while True:
            sessions = await _sessions(http, server)
            assert server.state is not None
            sample = await asyncio.to_thread(take, server.pid, server.state, notes.seconds, sessions)
            if sample is not None:
                notes.findings.samples.append(sample)
            await asyncio.sleep(PERIOD_S)


def take(pid: int, state: Path, at_s: float, sessions: int | None) -> Row | None:
    """What process `pid` and all below it use now; None if it is gone."""
    use = process_use(pid)
    if use is None or not use.rss_bytes:
        return None
    return {
        "second": at_s,
        "resident memory, MiB": use.rss_bytes / MIB,
        "open descriptors": descriptors(pid),
        "state folder, MiB": folder_bytes(state) / MIB,
        "open sessions": sessions,
    }


def descriptors(pid: int) -> int:
    """Open descriptors of a process and all below it."""
    found = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                found += process.num_fds()
    return found


def folder_bytes(folder: Path) -> int:
    """Sizes of all files below a folder; files and folders that vanish meanwhile do not count."""
    found = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                found += os.path.getsize(os.path.join(inner, name))
    return found


async def _sessions(http: httpx.AsyncClient, server: HostedServer) -> int | None:
    with suppress(httpx.HTTPError):
        told = [(await http.get(f"{url}/metrics")).text for url in server.urls.values()]
        found = [int(count) for text in told for count in SESSIONS.findall(text)]
        return sum(found) if found else None
    return None
