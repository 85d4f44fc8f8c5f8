"""What the clients ask again, with which key and after how long, and what they leave alone. Each case for both."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

import client
from app.domain.errors import DjinnError
from client import AsyncDjinn, Djinn, retries
from tests.client.conftest import SESSION, Stub, answering, wait_until_idle

OPENED = SESSION.model_dump_json(by_alias=True).encode()
CUT = b""
"""In place of an answer: the connection is closed."""


def answer(status: str, body: bytes, *headers: bytes) -> bytes:
    head = [f"HTTP/1.1 {status}".encode(), b"Content-Length: %d" % len(body), b"Connection: close", *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def refusal(status: str, code: str, *headers: bytes) -> bytes:
    error = {"message": "no", "type": "server_error", "code": code, "param": None}
    return answer(status, json.dumps({"error": error}).encode(), *headers)


DRAINING = refusal("503 Service Unavailable", "draining", b"Retry-After: 3")


def keys_of(stub: Stub) -> list[str | None]:
    lines = ([line.partition(": ") for line in head.splitlines()[1:]] for head in stub.asked)
    return [next((value for name, _, value in each if name.lower() == "idempotency-key"), None) for each in lines]


Ask = Callable[..., Any]


def blocking(url: str, work: str, *names: str, **options: Any) -> Any:
    with Djinn(url, timeout=30, **options) as djinn:
        if work == "ready":
            return djinn.ready()
        return djinn.sessions.create() if work == "create" else getattr(djinn.vectors, work)(*names)


def asynchronous(url: str, work: str, *names: str, **options: Any) -> Any:
    async def ask() -> Any:
        async with AsyncDjinn(url, timeout=30, **options) as djinn:
            if work == "ready":
                return await djinn.ready()
            return await (djinn.sessions.create() if work == "create" else getattr(djinn.vectors, work)(*names))

    return asyncio.run(ask())


both = pytest.mark.parametrize("ask", [blocking, asynchronous])


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the clients should have waited: they do not."""
    waited: list[float] = []
    wait_after = retries.Attempts.wait_after

    def note(attempts: retries.Attempts, error: client.DjinnError) -> float:
        waited.append(wait_after(attempts, error))
        return 0.0

    monkeypatch.setattr(retries.Attempts, "wait_after", note)
    return waited


@both
def test_what_was_not_done_is_asked_again_with_the_same_key_when_the_server_says(ask: Ask, waits: list[float]) -> None:
    with answering(DRAINING, refusal("429 Too Many", "queue_full"), answer("201 Created", OPENED)) as stub:
        assert ask(stub.url, "create").id == SESSION.id
    assert len(stub.asked) == 3
    assert len(set(keys_of(stub))) == 1
    assert keys_of(stub)[0] is not None
    assert waits[0] == 3
    assert retries.FIRST_WAIT_S < waits[1] <= 2 * retries.FIRST_WAIT_S


@both
def test_after_two_retries_the_error_is_told(ask: Ask) -> None:
    with answering(DRAINING) as stub, pytest.raises(client.ServerError):
        ask(stub.url, "create")
    assert len(stub.asked) == 3
    with answering(DRAINING) as stub, pytest.raises(client.ServerError):
        ask(stub.url, "create", max_retries=0)
    assert keys_of(stub) == [None], "the server would wait for who does not come back"
    with answering(DRAINING) as stub, pytest.raises(client.ServerError):
        ask(stub.url, "ready")
    assert len(stub.asked) == 1, "it is the answer"


@both
@pytest.mark.parametrize("first", [CUT, refusal("502 Bad Gateway", "replica_lost")])
def test_what_may_have_been_done_is_asked_again_only_with_a_key_or_to_read(ask: Ask, first: bytes) -> None:
    with answering(first, answer("201 Created", OPENED)) as stub:
        assert ask(stub.url, "create").id == SESSION.id
    assert len(set(keys_of(stub))) == 1
    lost = client.ConnectionLost, client.ServerError
    with answering(first, answer("204 No Content", b"")) as stub, pytest.raises(lost):
        ask(stub.url, "delete", "a")
    assert keys_of(stub) == [None]
    with answering(first, answer("200 OK", b'{"data": []}')) as stub:
        assert ask(stub.url, "list") == ()
    assert keys_of(stub) == [None, None]


@both
@pytest.mark.parametrize(
    "first",
    [
        refusal("500 Internal Server Error", "not_durable"),
        refusal("409 Conflict", "wrong_state"),
        refusal("429 Too Many", "session_limit", b"Retry-After: 3600"),
    ],
)
def test_what_a_retry_would_not_help_is_told_at_once(ask: Ask, first: bytes) -> None:
    with answering(first) as stub, pytest.raises(client.APIError):
        ask(stub.url, "create")
    assert len(stub.asked) == 1


def test_the_client_knows_every_error_that_says_when_to_retry() -> None:
    kinds = [DjinnError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    told = {kind.code for kind in kinds if kind.status == 503 and kind.retry_after_s and not kind.__subclasses__()}
    assert "engine_restarting" in told
    assert told <= retries.NOT_DONE | retries.MAYBE_DONE


def test_a_session_that_was_found_outlives_the_block_and_one_that_was_opened_does_not(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        with djinn.sessions.get(session.id):
            pass
        for each in djinn.sessions.list():
            with each:
                pass
        assert session.refresh().state == "idle"
    with pytest.raises(client.NotFound):
        djinn.sessions.get(session.id)


async def test_a_turn_whose_caller_is_cancelled_ends_at_once(server_url: str, slow_steps: None) -> None:
    with Djinn(server_url, timeout=30) as blocking, blocking.sessions.create() as session:
        async with AsyncDjinn(server_url, timeout=30) as djinn:
            turn = (await djinn.sessions.get(session.id)).generate(prompt="x", max_tokens=900, ignore_eos=True)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await turn
        assert wait_until_idle(session).tokens < 900
