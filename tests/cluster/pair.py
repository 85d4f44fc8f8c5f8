"""Two servers of a cluster, what the tests ask of them, and conversations of clients of OpenAI's API with them.

`Pair.clients` ask each server alone, as if another one had sent the request on. Clients of `Pair.urls` ask the cluster.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple

import httpx
from openai import OpenAI

from app.cluster.key import ClusterKey
from client import Djinn
from tests.durability.restarting import generate, open_session
from tests.orderly import ServerThread
from tests.processes import ServerProcess, metric, serve_process
from tests.waiting import wait_until

KEY = "a secret that is long enough to be one"
PROMPT = list(range(5, 45))
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
SOON_S = 60


def free_port() -> int:
    """Below the ports that systems give to connections: one of another test could have it before the server does."""
    while True:
        port = SystemRandom().randrange(12_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def alone(name: str) -> dict[str, str]:
    """Has the server of that name answer what is its own, and send nothing on."""
    return {"Djinn-Hop": f"t {ClusterKey(KEY.encode()).sign(b'hop', b't', name.encode())}"}


class Pair:
    """Servers `a` and `b`, which can end and be started again: on threads, or as processes that can be killed."""

    def __init__(
        self,
        folder: Path,
        *,
        as_processes: bool = False,
        own_engine: bool = False,
        flags: dict[str, tuple[str, ...]] | None = None,
        store: str | None = None,
    ) -> None:
        self._folder = folder
        self.store = store or f"folder:{folder}/cluster"
        self._as_processes = as_processes or own_engine
        self._own_engine = own_engine
        self._flags = flags or {}
        self.ports = {name: free_port() for name in ("a", "b")}
        self.threads: dict[str, ServerThread] = {}
        self.processes: dict[str, ServerProcess] = {}
        self._ends = {name: ExitStack() for name in self.ports}
        self.clients: dict[str, httpx.Client] = {}
        self.headers: dict[str, str] = {}
        (folder / "key").write_text(KEY)

    @property
    def urls(self) -> dict[str, str]:
        return {name: f"http://127.0.0.1:{port}" for name, port in self.ports.items()}

    @property
    def a(self) -> httpx.Client:
        return self.clients["a"]

    @property
    def b(self) -> httpx.Client:
        return self.clients["b"]

    def start(self, name: str, *more: str, prepare: Callable[[], None] | None = None) -> httpx.Client:
        """Start it; it may be one more. A process calls `prepare` first."""
        folder, ends = self._folder, self._ends.setdefault(name, ExitStack())
        self.ports.setdefault(name, free_port())
        flags = ["--replica", name, "--cluster", self.store, "--cluster-key-file", str(folder / "key")]
        flags += ["--port", str(self.ports[name]), *self._flags.get(name, ()), *more]
        if self._as_processes:
            serving = serve_process(folder / name, *flags, own_engine=self._own_engine, prepare=prepare)
            self.processes[name] = ends.enter_context(serving)
        else:
            assert prepare is None
            self.threads[name] = ends.enter_context(ServerThread(folder / name, *flags).running())
        headers = {**self.headers, **alone(name)}
        client = ends.enter_context(httpx.Client(base_url=self.urls[name], timeout=SOON_S, headers=headers))
        self.clients[name] = client
        wait_until(lambda: all(self._seen(http) == len(self.clients) for http in self.clients.values()), SOON_S)
        return client

    def _seen(self, http: httpx.Client) -> float:
        """How many servers that one sees take new work; all, if it does not say so to everybody."""
        if http.get("/metrics").is_error:
            time.sleep(1)
            return len(self.clients)
        return metric(http, 'djinn_cluster_replicas{state="ready"}')

    def end(self, name: str) -> None:
        """`kill -9` of a process; an end without a drain of what is on a thread."""
        self.clients.pop(name, None)
        self._ends[name].close()

    def tell_to_end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        if self._as_processes:
            os.kill(self.processes[name].pid, how)
        else:
            self.threads[name].tell(how)

    def ended(self, name: str) -> str:
        """Wait for its orderly end; returns its log."""
        self.clients.pop(name)
        if self._as_processes:
            process = self.processes[name]
            assert process.exit_status(SOON_S) == 0, process.output.read_text()
            return process.output.read_text()
        thread = self.threads[name]
        assert thread.exit_status(SOON_S) == 0, thread.log
        return thread.log

    def close(self) -> None:
        with ExitStack() as all_of_them:
            for ends in self._ends.values():
                all_of_them.push(ends)

    def move(self, session: str, here: str = "a", there: str = "b") -> httpx.Response:
        return self.clients[here].post(f"/v1/sessions/{session}/move", json={"replica": there})

    def moved(self, session: str, here: str = "a", there: str = "b") -> Any:
        with Djinn(self.urls[here], http_client=self.clients[here]) as djinn:
            return djinn.sessions.get(session).move(there).model_dump()

    def owners(self, session: str) -> list[str]:
        """The servers that serve the session now."""
        found = {name: client.get(f"/v1/sessions/{session}").status_code for name, client in self.clients.items()}
        return [name for name, status in found.items() if status == 200]

    def sdk(self, name: str) -> AbstractContextManager[OpenAI]:
        """The official client of that server alone."""
        return sdk(self.urls[name], headers=alone(name))

    def settled(self, session: str) -> str:
        """Wait until both servers know who has the session; there must never be two that do."""
        for _ in range(20 * SOON_S):
            found = {name: client.get(f"/v1/sessions/{session}").status_code for name, client in self.clients.items()}
            owners = [name for name, status in found.items() if status == 200]
            assert len(owners) <= 1, owners
            if owners and 409 not in found.values():
                return owners[0]
            time.sleep(0.05)
        raise AssertionError("nobody has the session")


@contextmanager
def pair(folder: Path, *, start: bool = True, **options: Any) -> Iterator[Pair]:
    """Both servers, running unless told otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    found = Pair(folder, **options)
    try:
        for name in found.ports if start else ():
            found.start(name)
        yield found
    finally:
        found.close()


def used_session(http: httpx.Client) -> str:
    """One that has had a turn."""
    session = open_session(http)
    generate(http, session, PROMPT)
    return session


@contextmanager
def behind(servers: Pair, name: str = "b") -> Iterator[httpx.Client]:
    """A client of the whole cluster, that asks the server of that name."""
    with httpx.Client(base_url=servers.urls[name], timeout=SOON_S, headers=servers.headers) as http:
        yield http


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


MODEL = "tiny-llama"
ASKED: Any = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
TOKENS = 4
TEXTS = ("One", "Two", "Three", "Four", "Five")


class Said(NamedTuple):
    text: str
    prompt: int
    cached: int


@contextmanager
def sdk(url: str, *, api_key: str = "none", headers: Mapping[str, str] | None = None) -> Iterator[OpenAI]:
    """The official client, which repeats nothing."""
    with OpenAI(
        base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=SOON_S, default_headers=headers
    ) as client:
        yield client


@dataclass
class Chat:
    """A chat whose calls are bound by a name. Each call sends all of it."""

    name: str
    messages: list[Any] = field(default_factory=list)
    session: str = ""

    def say(self, client: OpenAI, text: str) -> Said:
        messages = [*self.messages, {"role": "user", "content": text}]
        raw = client.chat.completions.with_raw_response.create(
            **ASKED, messages=messages, max_tokens=TOKENS, extra_headers={"X-Session-ID": self.name}
        )
        answer = raw.parse()
        reply, usage = answer.choices[0].message.content or "", answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        self.session = raw.headers["X-Session-ID"]
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        return Said(reply, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0)


@dataclass
class Chain:
    """Responses, each of which goes on from the one before."""

    name: str | None = None
    ids: list[str] = field(default_factory=list)
    session: str = ""

    def say(self, client: OpenAI, text: str) -> Said:
        previous = self.ids[-1] if self.ids else None
        headers = {} if self.name is None else {"X-Session-ID": self.name}
        raw = client.responses.with_raw_response.create(
            **ASKED, input=text, previous_response_id=previous, max_output_tokens=TOKENS, extra_headers=headers
        )
        answer = raw.parse()
        assert answer.usage is not None
        self.ids.append(answer.id)
        self.session = raw.headers["X-Session-ID"]
        return Said(answer.output_text, answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens)


def named(http: httpx.Client, name: str) -> list[str]:
    """Ids of the caller's sessions that have this name."""
    found = http.get("/v1/sessions", params={"name": name}).raise_for_status().json()["data"]
    return [each["id"] for each in found]


def status(http: httpx.Client, response_id: str) -> int:
    return http.get(f"/v1/responses/{response_id}").status_code
