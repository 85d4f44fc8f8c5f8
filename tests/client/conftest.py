"""Clients of the shared server, and servers that answer wrongly."""

import inspect
import socketserver
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, cast

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

import client
from client import AsyncDjinn, Djinn, Session
from client.calls import TurnOptions
from client.models import SessionInfo
from tests.waiting import wait_until

AnswerWith = Callable[[bytes], str]
NOBODY = "http://127.0.0.1:9"
"""Where no server listens, and none that other tests start: systems give them other ports."""
SESSION = SessionInfo.model_validate_json("""{
    "id": "ses_1", "tenant": null, "state": "idle", "phase": "compute", "residency": "best_effort",
    "adapter": null, "tokens": 0,
    "kv": {"tier": null, "blocks": 0, "device_bytes": 0, "host_bytes": 0, "disk_bytes": 0},
    "usage": {
        "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0, "tokens_recomputed": 0,
        "bytes_out": 0, "bytes_in": 0, "restores": 0, "resume_ms": {"queue": 0, "restore": 0, "prefill": 0},
        "last_turn": null
    },
    "checkpoint": null, "interrupted_turn": null, "breakpoints": [], "forked_from": null, "metadata": {},
    "created_at": 0, "used_at": 0, "returns_at": null, "expires_at": null
}""")
PROMPT = list(range(5, 25))
GREEDY: TurnOptions = {"token_ids": PROMPT, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


def paused(djinn: Djinn, layer: int = 1, **options: Any) -> Session:
    """A session that is paused after a layer, over its prompt."""
    session = djinn.sessions.create()
    session.break_at(layer=layer, **options)
    assert session.generate(**GREEDY).status == "paused"
    return session


def wait_until_idle(session: Session) -> SessionInfo:
    """What is told of the session once its turn is over."""
    wait_until(lambda: session.refresh().state == "idle")
    return session.info


KINDS = tuple(getattr(client, name) for name in client.__all__ if name.startswith("Async"))


class Blocking:
    """An object of the client for asyncio, used as if it blocked: so one test holds for both clients.

    Its methods run on the portal's event loop and are waited for.
    """

    def __init__(self, portal: BlockingPortal, wrapped: Any) -> None:
        self._portal = portal
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return self._seen(getattr(self._wrapped, name))

    def __iter__(self) -> Iterator[Any]:
        return self._each(aiter(self._wrapped))

    def __enter__(self) -> Self:
        self._portal.call(self._wrapped.__aenter__)
        return self

    def __exit__(self, *raised: object) -> None:
        self._portal.call(self._wrapped.__aexit__, *raised)

    def _seen(self, value: Any) -> Any:
        """What the blocking client would have in the place of `value`."""
        if isinstance(value, KINDS):
            return Blocking(self._portal, value)
        if inspect.ismethod(value):
            return lambda *args, **options: self._seen(value(*args, **options))
        if inspect.isawaitable(value):
            return self._seen(self._portal.call(_wait, value))
        if isinstance(value, AbstractAsyncContextManager):
            return self._block(value)
        if isinstance(value, AsyncIterator):
            return self._each(value)
        return [self._seen(item) for item in value] if isinstance(value, list) else value

    @contextmanager
    def _block(self, manager: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
        with self._portal.wrap_async_context_manager(manager) as value:
            yield self._seen(value)

    def _each(self, values: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._seen(self._portal.call(_wait, anext(values)))
            except StopAsyncIteration:
                return


async def _wait(value: Awaitable[Any]) -> Any:
    return await value


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """An event loop on a thread of its own."""
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(params=["blocking", "asyncio"])
def djinn(request: pytest.FixtureRequest, portal: BlockingPortal, server_url: str) -> Iterator[Djinn]:
    """Each client of the shared server in turn, both to be used like the blocking one."""
    if request.param == "blocking":
        with Djinn(server_url, timeout=30) as djinn:
            yield djinn
    else:
        with Blocking(portal, AsyncDjinn(server_url, timeout=30)) as adjinn:
            yield cast("Djinn", adjinn)


@pytest.fixture(scope="session")
def expected(server_url: str) -> tuple[int, ...]:
    """What the model says after `PROMPT` without breakpoints."""
    with Djinn(server_url, timeout=30) as djinn, djinn.sessions.create() as session:
        return session.generate(**GREEDY).token_ids


@pytest.fixture
def answer_with() -> Iterator[AnswerWith]:
    """Start a server that sends these bytes in answer to any request, and closes the connection; returns its URL."""
    with ExitStack() as servers:
        yield lambda answer: servers.enter_context(answering(answer)).url


@dataclass
class Stub:
    """Gives one answer after the other, the last one again and again. `asked` are the heads of the requests."""

    asked: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def answering(*answers: bytes) -> Iterator[Stub]:
    """A server that sends these bytes, whatever it is asked, and closes the connection."""
    stub = Stub()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += self.rfile.readline()
            length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
            self.rfile.read(int(length.split(b":")[1]))
            stub.asked.append(head.decode())
            self.wfile.write(answers[min(len(stub.asked), len(answers)) - 1])

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        stub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield stub
        server.shutdown()
        thread.join()
