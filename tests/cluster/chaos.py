"""A cluster whose nodes are network namespaces, with etcd and the proxy of docker/, and clients that know what each
turn must say. One namespace routes between the others; the thread of the tests, etcd and the proxy share the world.
"""

import ctypes
import json
import os
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.etcd import Program
from tests.cluster.pair import KEY, MODEL
from tests.docker.reading import DOCKER, documents
from tests.durability.restarting import generate, open_session
from tests.processes import ServerProcess, forking, serve_process
from tests.waiting import wait_until

NODES = range(4)
"""Each is the replica of that number; the last one is not there at the start."""
OWN_ENGINE = 1
"""This one's engine has a process, which takes seconds to start."""
WORLD = 100
DOOR = f"http://10.77.{WORLD}.2:8000"
AUTHORIZATION = {"Authorization": "Bearer sesame"}
MOST_S = 15.0
"""What a client may wait for any answer."""
AGENTS, TOKENS = 8, 4
AGAIN = (409, 421, 429, 502, 503)
"""Nothing was done, or a request with the same key gets what was."""


def enter(path: str) -> None:
    """Have this thread, and what it starts, in that network namespace."""
    with Path(path).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns", path)


def enter_node(path: str) -> None:
    """For a server's process, before it starts."""
    enter(path)
    os.environ["DJINN_API_KEY"] = "sesame"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Network:
    """The namespaces. The node n has the address 10.77.n.2."""

    def __init__(self) -> None:
        self._prefix = f"djinn{os.getpid()}"
        self._hub = f"{self._prefix}-hub"

    def path(self, node: int) -> str:
        return f"/run/netns/{self._prefix}-{node}"

    @contextmanager
    def there(self) -> Iterator[None]:
        """Make them, with this thread in the world. Skips the test where that is not possible."""
        for program, package in {"ip": "iproute2", "etcd": "etcd-server", "haproxy": "haproxy"}.items():
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed: apt-get install {package}")
        forking()
        forkserver.ensure_running()  # it outlives the namespaces
        with ExitStack() as ends:
            for node in ("hub", *NODES, WORLD):
                name = f"{self._prefix}-{node}"
                try:
                    ip("netns", "add", name)
                except subprocess.CalledProcessError as error:
                    pytest.skip(f"this user can make no network namespaces: {error.stderr}")
                ends.callback(ip, "netns", "del", name)
                ip("-n", name, "link", "set", "lo", "up")
                if node == "hub":
                    ip("netns", "exec", name, "sysctl", "-qw", "net.ipv4.ip_forward=1")
                    continue
                ip("-n", self._hub, "link", "add", f"v{node}", "type", "veth", "peer", "name", "e0", "netns", name)
                for where, device, end in ((self._hub, f"v{node}", 1), (name, "e0", 2)):
                    ip("-n", where, "addr", "add", f"10.77.{node}.{end}/30", "dev", device)
                    ip("-n", where, "link", "set", device, "up")
                ip("-n", name, "route", "add", "default", "via", f"10.77.{node}.1")
            home = ends.enter_context(Path("/proc/thread-self/ns/net").open())
            ends.callback(enter, f"/proc/self/fd/{home.fileno()}")
            enter(self.path(WORLD))
            yield

    @contextmanager
    def cut(self, node: int) -> Iterator[None]:
        """Packets to the node and from it vanish without a word."""
        hole, link = ("blackhole", f"10.77.{node}.2/32"), ("link", "set", f"v{node}")
        ip("-n", self._hub, "route", "add", *hole)
        ip("-n", self._hub, *link, "down")
        yield
        ip("-n", self._hub, *link, "up")
        ip("-n", self._hub, "route", "del", *hole)


class Cluster:
    """Replicas r0, r1, ... on their nodes, and etcd and the proxy as docker/ has them."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self.network = folder, network
        self.servers: dict[int, ServerProcess] = {}
        self._ends = {node: ExitStack() for node in NODES}
        (folder / "key").write_text(KEY)
        command = documents("compose.yaml")[0]["services"]["etcd"]["command"]
        here = [word.replace("/var/lib", str(folder)).replace("//etcd:", f"//10.77.{WORLD}.2:") for word in command]
        self.etcd = Program(folder / "etcd.log", *here, "--unsafe-no-fsync")
        where = {"DOOR": DOOR.removeprefix("http://"), "REPLICA_PREFIX": "10.77.", "REPLICA_SUFFIX": ".2"}
        self.proxy = Program(folder / "haproxy.log", "haproxy", "-db", "-f", str(DOCKER / "haproxy.cfg"), **where)

    @contextmanager
    def running(self) -> Iterator["Cluster"]:
        with ExitStack() as ends:
            for program in (self.etcd, self.proxy):
                program.start()
                ends.callback(program.kill)
            for each in self._ends.values():
                ends.push(each)
            self.start(0, 1, 2)
            yield self

    @staticmethod
    def url(node: int) -> str:
        return f"http://10.77.{node}.2:8000"

    def start(self, *nodes: int) -> None:
        """Start their replicas, all at once."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._start, nodes))

    def _start(self, node: int, name: str = "") -> None:
        name = name or f"r{node}"
        flags = ["--host", f"10.77.{node}.2", "--port", "8000", "--replica", name, "--drain-timeout-s", "20"]
        flags += ["--cluster", f"etcd://10.77.{WORLD}.2:2379", "--cluster-key-file", str(self.folder / "key")]
        prepare = partial(enter_node, self.network.path(node))
        process = serve_process(self.folder / f"r{node}", *flags, own_engine=node == OWN_ENGINE, prepare=prepare)
        self.servers[node] = self._ends[node].enter_context(process)

    def refused(self, node: int, name: str) -> str:
        """Why the replica of that name cannot start on the node, with the folder that is there."""
        with pytest.raises(RuntimeError) as error:
            self._start(node, name)
        shutil.rmtree(self.folder / f"r{node}")
        return str(error.value)

    def end(self, node: int) -> None:
        """SIGTERM, and the orderly end."""
        self.servers[node].terminate()
        assert self.servers[node].exit_status(0) == 0, self.servers[node].output.read_text()
        self.kill(node)

    def kill(self, node: int) -> None:
        """`kill -9`."""
        self._ends[node].close()

    @contextmanager
    def suspended(self, what: str) -> Iterator[None]:
        """The server with an engine of its own, or that engine, stands still."""
        process = psutil.Process(self.servers[OWN_ENGINE].pid)
        if what == "engine":
            (process,) = (each for each in process.children() if "app.engine_process" in each.cmdline())
        process.suspend()
        yield
        process.resume()


class Agent:
    """A client with a session of its own, by its id or by a name. It repeats what was refused until it is done."""

    def __init__(self, number: int) -> None:
        self._once = f"{time.monotonic_ns()} {number}"
        self.name = self._once if number % 2 else None
        self.session: str | None = None
        self.turns: list[tuple[list[int], list[int]]] = []
        self.longest_s = 0.0
        self.refusals: Counter[str] = Counter()
        self._number, self.home = number, number % 3
        self.http = httpx.Client(base_url=DOOR, headers=AUTHORIZATION, timeout=2 * MOST_S)

    @property
    def history(self) -> list[int]:
        return [token for sent, said in self.turns for token in (*sent, *said)]

    def take_turn(self) -> None:
        count = len(self.turns)
        sent = [5 + self._number, 20 + count, 7]
        asked: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        if self.name is not None:
            asked |= {"model": MODEL, "prompt": [*self.history, *sent], "return_token_ids": True}
            answer = self.ask("POST", "/v1/completions", {"X-Session-ID": self.name}, asked)
            said = answer.json()["choices"][0]["token_ids"]
            found = answer.headers["X-Session-ID"]
            assert self.session in (None, found), f"{self.name} is {self.session} and {found}"
            self.session = found
        else:
            if self.session is None:
                self.session = self.ask("POST", "/v1/sessions", self._key(), {}).json()["id"]
            asked |= {"token_ids": sent, "stream": bool(count % 2)}
            answer = self.ask("POST", f"/v1/sessions/{self.session}/generate", self._key(), asked)
            said = json.loads(answer.text.rpartition("event: finished\ndata: ")[2])["token_ids"]
        self.turns.append((sent, said))
        if not count:
            where = {"replica": f"r{self.home}"}
            self.ask("POST", f"/v1/sessions/{self.session}/move", {}, where)

    def ask(self, method: str, path: str, headers: dict[str, str], body: Any = None) -> httpx.Response:
        """The answer. What has no end, as a stream that breaks, is asked for again too."""
        deadline = time.monotonic() + 4 * MOST_S
        while True:
            began = time.monotonic()
            try:
                answer = self.http.request(method, path, headers=headers, json=body)
                cause = "" if answer.is_success else f"{answer.status_code} {answer.text[:300]}"
                if answer.is_success and answer.headers["content-type"].startswith("text/event-stream"):
                    cause = "" if "event: finished" in answer.text else f"stream {answer.text[-300:]}"
                assert answer.is_success or answer.status_code in AGAIN, f"{method} {path}: {cause}"
            except httpx.TransportError as error:
                cause = repr(error)
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            if not cause or "already_there" in cause:
                return answer
            self.refusals[f"{path.rpartition('/')[2]}: {cause}"] += 1
            assert time.monotonic() < deadline, f"{method} {path}: {self.refusals}"
            time.sleep(0.1)

    def _key(self) -> dict[str, str]:
        return {"Idempotency-Key": f"{self._once} {self.session} {len(self.turns)}"}


class Load:
    """Agents, and one who asks for the lists, in the block. At its end all is compared with a single server."""

    def __init__(self, twin: httpx.Client) -> None:
        self.agents = [Agent(number) for number in range(AGENTS)]
        self.lister = Agent(AGENTS)
        self._twin, self._over = twin, threading.Event()
        self._pool = ThreadPoolExecutor(AGENTS + 1)

    def __enter__(self) -> "Load":
        self._lives = [self._pool.submit(self._live, each.take_turn) for each in self.agents]
        self._lives.append(self._pool.submit(self._live, self._list))
        self.go_on(2)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.go_on(2)
                self._over.set()
                for life in self._lives:
                    life.result()
                list(self._pool.map(self._check, self.agents))
        finally:
            self._over.set()
            self._pool.shutdown()
            for each in (*self.agents, self.lister):
                each.http.close()
        if kind is None:
            waits = [round(each.longest_s, 1) for each in (*self.agents, self.lister)]
            assert max(waits) < MOST_S, waits
            assert not self.lister.refusals, f"lists did not answer: {self.lister.refusals}"

    def go_on(self, count: int, *, agents: Sequence[Agent] | None = None) -> None:
        """Wait until these agents have taken so many more turns, or all."""
        before = {each: len(each.turns) for each in (self.agents if agents is None else agents)}
        wait_until(
            lambda: (
                any(life.done() for life in self._lives)
                or all(len(each.turns) >= had + count for each, had in before.items())
            ),
            4 * MOST_S,
        )
        for life in self._lives:
            assert not life.done(), life.result()

    def _live(self, step: Any) -> None:
        while not self._over.wait(0.3):
            step()

    def _list(self) -> None:
        for path in ("/v1/sessions", "/v1/models", "/v1/memory"):
            self.lister.ask("GET", path, {})

    def _check(self, agent: Agent) -> None:
        """What it was told is what one server says, and what its session has, which is the only one of its name."""
        twin = open_session(self._twin)
        for number, (sent, said) in enumerate(agent.turns):
            right = generate(self._twin, twin, sent, TOKENS)["token_ids"]
            assert said == right, f"turn {number} of {agent.session} ({agent.name}), after {agent.refusals}"
        self._twin.delete(f"/v1/sessions/{twin}").raise_for_status()
        found = agent.ask("GET", f"/v1/sessions/{agent.session}/history", {}).json()["token_ids"]
        assert found == agent.history
        if agent.name is not None:
            page = agent.ask("GET", f"/v1/sessions?name={agent.name}", {}).json()["data"]
            assert [each["id"] for each in page] == [agent.session]
