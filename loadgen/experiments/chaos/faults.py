"""What is done to the server, one thing at a time; and what only a cluster has: sessions that an operator moves, and
one owner of each.
"""

import asyncio
import random
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
from prometheus_client.parser import text_string_to_metric_families

from client import AsyncDjinn
from client.calls import Call
from client.errors import APIError, DjinnError
from client.transport import AsyncTransport
from loadgen.errors import NotAsMeant
from loadgen.experiments.chaos.agents import Mirror, SessionAgent, settled
from loadgen.experiments.chaos.hosting import KEYS, MOVER, WATCHER, Cluster, HostedServer, bearer
from loadgen.experiments.chaos.plan import FIRST_TOKEN, LAST_TOKEN, ChaosPlan, Findings, Notes
from loadgen.processes.process import START_TIMEOUT_S
from loadgen.targets import TargetSpec
from loadgen.targets.djinn import greedy

POLL_S = 0.05
FULL_S = 3.0
"""How long a disk is full."""
STREAMS = 8
MOST_DAMAGED = 4
NAME = "faults"
NO_CLOCK = "another time of day needs rights over the machine, and would reach everything on it"


class Faults:
    """Makes the plan's faults, and writes down when each began and ended."""

    def __init__(
        self, plan: ChaosPlan, server: HostedServer, djinn: AsyncDjinn, twin: AsyncDjinn, notes: Notes
    ) -> None:
        self._plan, self._server, self._djinn, self._twin, self._notes = plan, server, djinn, twin, notes
        self._choose = random.Random(f"{plan.seed} faults")
        self._actions: dict[str, Callable[[], Awaitable[str]]] = {
            "kill of the engine": self._kill_engine,
            "kill of the server": self._kill_server,
            "end of the server": self._end_server,
            "damaged KV": self._damage,
            "full disk": self._fill_disk,
            "cancelled streams": self._cancel_streams,
            "kill of a replica": lambda: self._signal_replica(signal.SIGKILL),
            "end of a replica": lambda: self._signal_replica(signal.SIGTERM),
        }

    async def run(self, say: Callable[[str], None]) -> None:
        """Make one after the other for as long as the plan says. Raises `ServerFailedError`, `TwinFailed`."""
        self._notes.findings.skipped["clock steps"] = NO_CLOCK
        for wait_s, name in self._plan.timetable():
            left_s = self._plan.seconds - self._notes.seconds
            await asyncio.sleep(min(wait_s, max(0.0, left_s)))
            if wait_s >= left_s:
                return
            say(await self._make(name))

    async def _make(self, name: str) -> str:
        sent_s = self._notes.seconds
        with self._notes.disturbed(name) as words:
            try:
                words.append(await self._actions[name]())
            except DjinnError as error:
                self._notes.failed(NAME, name, sent_s, error)
                words.append(f"broken off: {error}")
            except NotAsMeant as error:
                self._notes.lost(NAME, name, str(error))
                words.append(str(error))
            if not await self._server.is_ready():
                await self._server.until_ready()
        return f"{name}: {'; '.join(words)}"

    async def _kill_engine(self) -> str:
        """Until another engine is there."""
        before = self._server.engine()
        if before is None:
            raise NotAsMeant("the server has no engine to kill")
        before.kill()
        began, deadline = time.monotonic(), time.monotonic() + START_TIMEOUT_S
        while (engine := self._server.engine()) is None or engine.pid == before.pid:
            await _look(deadline, "no other engine was started")
        await self._server.until_ready()
        return f"ready after {time.monotonic() - began:.1f} s"

    async def _kill_server(self) -> str:
        await asyncio.to_thread(self._server.kill)
        return await self._start_again()

    async def _end_server(self) -> str:
        try:
            await asyncio.to_thread(self._server.end)
        except NotAsMeant as error:
            self._notes.lost(NAME, "end of the server", str(error))
        return await self._start_again()

    async def _signal_replica(self, number: signal.Signals) -> str:
        """Until its keeper has put another in its place, and all know each other."""
        assert isinstance(self._server, Cluster)
        running = self._server.replicas()
        if not running:
            raise NotAsMeant("the cluster has no replica")
        name = self._choose.choice(sorted(running))
        began, deadline = time.monotonic(), time.monotonic() + START_TIMEOUT_S
        with suppress(psutil.NoSuchProcess):
            running[name].send_signal(number)
        while (now := self._server.replicas().get(name)) is None or now.pid == running[name].pid:
            await _look(deadline, f"replica {name} did not come back")
        await self._server.until_ready()
        return f"{name}, back after {time.monotonic() - began:.1f} s"

    async def _start_again(self) -> str:
        began = time.monotonic()
        await self._server.start()
        return f"started again in {time.monotonic() - began:.1f} s"

    async def _damage(self) -> str:
        """Flip a byte of some KV files, somewhere."""
        assert self._server.state is not None
        files = sorted((self._server.state / "kv").glob("*.safetensors"))
        chosen = self._choose.sample(files, min(len(files), MOST_DAMAGED))
        damaged = sum(flip_a_byte(path, self._choose) for path in chosen)
        return f"{damaged} of {len(files)} files"

    async def _fill_disk(self) -> str:
        """No file of the server may grow: what a full disk is to it."""
        assert self._server.state is not None
        if not hasattr(resource, "prlimit"):
            self._notes.findings.skipped["full disk"] = "this system has no limit on the size of a process's files"
            return "not made"
        size = max((path.stat().st_size for path in self._server.state.glob("*-wal")), default=0)
        engine = self._server.engine()
        with full_for([self._server.pid, *([] if engine is None else [engine.pid])], size):
            await asyncio.sleep(FULL_S)
        return f"for {FULL_S:.0f} s"

    async def _cancel_streams(self) -> str:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._cancel_stream()) for _ in range(STREAMS)]
        return f"{len(tasks)} streams, {sum(task.result() for task in tasks)} tokens kept"

    async def _cancel_stream(self) -> int:
        """Leave a stream after its first event. Returns how many tokens the session has kept of it."""
        sent_s = self._notes.seconds
        prompt = tuple(self._choose.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(8))
        try:
            async with await self._djinn.sessions.create(metadata={"agent": NAME}) as session:
                tokens = self._plan.context - self._plan.longest_turn
                async with session.stream(**greedy(prompt, tokens)) as stream:
                    async for _ in stream:
                        break
                history = await settled(session)
        except DjinnError as error:
            self._notes.failed(NAME, "cancelled stream", sent_s, error)
            return 0
        if history is None or history[: len(prompt)] != prompt:
            self._notes.lost(NAME, "cancelled stream", "the session has lost the prompt of a cancelled turn")
            return 0
        made = history[len(prompt) :]
        expected = await Mirror(self._twin).answer_once(prompt, len(made))
        self._notes.compared(NAME, made, expected, tokens=len(made), position=len(prompt))
        return len(made)


def flip_a_byte(path: Path, choose: random.Random) -> bool:
    """Turn all bits of one byte. Whether the file was there."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        place = choose.randrange(max(1, path.stat().st_size))
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes(255 - value for value in byte))
        return True
    return False


@contextmanager
def full_for(pids: list[int], size: int) -> Iterator[None]:
    """In the block no file of these processes may grow beyond `size` bytes. One that ends meanwhile is no error."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    try:
        for pid, (_, hard) in before.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
        yield
    finally:
        for pid, limits in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


async def _look(deadline: float, otherwise: str) -> None:
    """Wait a little. Raises `NotAsMeant` at the deadline."""
    if time.monotonic() > deadline:
        raise NotAsMeant(otherwise)
    await asyncio.sleep(POLL_S)


AT_ONCE = 8
"""Moves under way at most: one that hangs does not end the others."""
HAS, ELSEWHERE = 200, (404, 421)
"""What a replica answers that has a session, and one that does not."""
SETTLED_S = 120.0
"""How long a session may be between two homes after the run."""
ASK_EVERY_S, READ_TIMEOUT_S = 0.5, 30.0
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
        await asyncio.sleep(ASK_EVERY_S)


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
