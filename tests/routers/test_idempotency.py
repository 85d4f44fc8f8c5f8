"""`Idempotency-Key`: a request that comes again gets the first answer, and nothing is done twice."""

import asyncio
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse
from starlette.types import Message, Receive, Scope, Send

from app.sessions.keyed import KeyedRequest, KeyedRequests
from app.web import idempotency
from app.web.idempotency import IdempotencyMiddleware
from app.web.sse import disconnected
from tests.conftest import ServeWith
from tests.durability.restarting import open_session
from tests.durability.test_kills import history
from tests.errors import assert_error
from tests.routers.generating import wait_until_idle
from tests.serving import serve
from tests.waiting import wait_until

TURN: dict[str, Any] = {"token_ids": [5, 6, 7], "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
LONG: dict[str, Any] = {**TURN, "max_tokens": 800}


def keyed(key: str | None = None) -> dict[str, str]:
    return {"Idempotency-Key": key or str(uuid.uuid4())}


def test_a_session_is_opened_once(http: httpx.Client) -> None:
    headers = keyed()
    first = http.post("/v1/sessions", json={"metadata": {"a": "b"}}, headers=headers)
    again = http.post("/v1/sessions", json={"metadata": {"a": "b"}}, headers=headers)
    assert (first.status_code, again.status_code, again.json()) == (201, 201, first.json())
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert len(again.headers.get_list("x-request-id")) == 1
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert http.post("/v1/sessions", json={}, headers=keyed()).json()["id"] != first.json()["id"]
    forks = [http.post(f"/v1/sessions/{first.json()['id']}/fork", headers=keyed("fork")).json()["id"] for _ in range(2)]
    assert len({first.json()["id"], *forks}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_is_taken_once_and_its_answer_is_the_same(http: httpx.Client, stream: bool) -> None:
    session, headers = open_session(http), keyed()
    asked = {**TURN, "stream": stream, "logprobs": 2}
    first, again = (http.post(f"/v1/sessions/{session}/generate", json=asked, headers=headers) for _ in range(2))
    assert first.status_code == 200
    assert again.content == first.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert len(history(http, session)) == 3 + 8
    http.post(f"/v1/sessions/{session}/generate", json=asked, headers=keyed())
    assert len(history(http, session)) == 2 * (3 + 8)


def test_a_key_is_for_one_request_of_one_tenant(serve_with: ServeWith) -> None:
    http = serve_with(api_keys=("a" * 32, "b" * 32))
    ann, bob = ({"X-Api-Key": each * 32, **keyed("same")} for each in "ab")
    first = http.post("/v1/sessions", json={}, headers=ann)
    assert http.post("/v1/sessions", json={}, headers=bob).json()["id"] != first.json()["id"]
    reused = http.post("/v1/sessions", json={"ttl_s": 60}, headers=ann)
    assert "a key is for one request" in assert_error(reused, 422, "idempotency_key_reused", param="Idempotency-Key")
    path = f"/v1/sessions/{first.json()['id']}/generate"
    assert_error(http.post(path, json=TURN, headers=ann), 422, "idempotency_key_reused", param="Idempotency-Key")


@pytest.mark.parametrize("key", ["", "k" * 256, "tab\there", "k\xe9y"])
def test_a_key_that_is_none_is_refused(http: httpx.Client, key: str) -> None:
    answer = http.post("/v1/sessions", json={}, headers=[(b"Idempotency-Key", key.encode("latin-1"))])
    assert "1 to 255 printable" in assert_error(answer, 400, "malformed_request", param="Idempotency-Key")


def test_what_was_not_done_can_be_asked_for_again(http: httpx.Client) -> None:
    session, headers = open_session(http), keyed()
    path = f"/v1/sessions/{session}/generate"
    assert http.post(path, json={**TURN, "token_ids": [1 << 20]}, headers=headers).status_code == 422
    assert http.post(path, json=TURN, headers=headers).status_code == 200
    unknown = http.post("/v1/sessions/ses_none/generate", json=TURN, headers=keyed())
    assert_error(unknown, 404, "not_found", param="session_id")


@contextmanager
def cut_off(http: httpx.Client, path: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[list[str]]:
    """A stream whose connection is closed after the first events, which the block gets."""
    with connect_sse(http, "POST", path, json={**body, "stream": True}, headers=headers) as source:
        events = source.iter_sse()
        yield [next(events).data for _ in range(3)]


def test_a_stream_that_was_cut_is_read_from_its_beginning(http: httpx.Client) -> None:
    session, headers = open_session(http), keyed()
    path = f"/v1/sessions/{session}/generate"
    with cut_off(http, path, LONG, headers) as seen:
        pass
    with connect_sse(http, "POST", path, json={**LONG, "stream": True}, headers=headers) as source:
        events = list(source.iter_sse())
    assert [each.data for each in events[:3]] == seen
    assert events[-1].event == "finished"
    assert events[-1].json()["usage"]["completion_tokens"] == 800
    assert len(history(http, session)) == 3 + 800


@pytest.mark.parametrize("late", range(12))
async def test_a_turn_that_begins_as_its_client_leaves_is_not_cancelled(late: int) -> None:
    gone, cancelled = asyncio.Event(), list[bool]()
    body: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive_client() -> Message:
        if not body:
            await gone.wait()
        return body.pop() if body else {"type": "http.disconnect"}

    async def begin_turn(scope: Scope, receive: Receive, send: Send) -> None:
        request: KeyedRequest = scope["state"]["keyed"]
        gone.set()
        for _ in range(late):
            await asyncio.sleep(0)
        if not request.is_left:
            request.outlives_client = True
            cancelled.append(False)
            with suppress(TimeoutError):
                await asyncio.wait_for(disconnected(receive), 0.05)
                cancelled[-1] = True
        done.set()

    done, state = asyncio.Event(), {"owner": None}
    scope = {"type": "http", "method": "POST", "path": "/v1/sessions/a/generate", "query_string": b"", "state": state}
    scope["headers"] = [(b"idempotency-key", b"a")]
    await IdempotencyMiddleware(begin_turn, KeyedRequests())(scope, receive_client, lambda message: asyncio.sleep(0))
    await done.wait()
    assert cancelled in ([], [False])


def test_two_who_ask_at_once_get_one_turn(http: httpx.Client) -> None:
    session, headers, answers = open_session(http), keyed(), list[bytes]()

    def ask() -> None:
        with httpx.Client(base_url=http.base_url, timeout=60) as own:
            answers.append(own.post(f"/v1/sessions/{session}/generate", json=LONG, headers=headers).content)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 1
    assert len(history(http, session)) == 3 + 800


def test_a_turn_whose_client_never_comes_back_is_cancelled_and_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "GRACE_S", 0.05)
    with serve() as url, httpx.Client(base_url=url, timeout=60) as http:
        session, headers = open_session(http), keyed()
        path = f"/v1/sessions/{session}/generate"
        body = {**LONG, "stream": True}
        with cut_off(http, path, LONG, headers):
            pass
        wait_until_idle(http, f"/v1/sessions/{session}")
        held = history(http, session)
        assert len(held) < 3 + 800
        again = http.post(path, json=body, headers=headers)
        assert '"finish_reason":"cancelled"' in again.text
        assert again.headers["idempotent-replayed"] == "true"
        assert history(http, session) == held
        without = http.post(path, json={**LONG, "max_tokens": 1}, headers=keyed())
        assert without.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 8, "n": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 8}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 8, "store": False}),
    ],
)
def test_calls_of_other_apis_get_one_answer(http: httpx.Client, path: str, body: dict[str, Any], stream: bool) -> None:
    asked, headers = {"model": "tiny-llama", **body, "stream": stream}, keyed()
    first, again = (http.post(path, json=asked, headers=headers) for _ in range(2))
    assert first.status_code == 200
    assert again.content == first.content
    assert http.post(path, json=asked, headers=keyed()).content != first.content
    assert http.post(path, json={**asked, "temperature": 0.5}, headers=headers).status_code == 400


def test_a_paused_turn_is_answered_again_as_it_paused(http: httpx.Client) -> None:
    session, headers = open_session(http), keyed()
    path = f"/v1/sessions/{session}"
    http.post(f"{path}/breakpoints", json={"layer": 1, "action": "pause", "once": True}).raise_for_status()
    first, again = (http.post(f"{path}/generate", json=TURN, headers=headers) for _ in range(2))
    assert first.json()["status"] == "paused"
    assert again.content == first.content
    assert http.post(f"{path}/resume").json()["status"] == "finished"
    assert http.post(f"{path}/generate", json=TURN, headers=headers).content == first.content
    assert len(history(http, session)) == 3 + 8


def test_a_key_goes_with_its_session(http: httpx.Client) -> None:
    headers = keyed()
    first = http.post("/v1/sessions", json={}, headers=headers).json()["id"]
    http.delete(f"/v1/sessions/{first}").raise_for_status()
    assert http.post("/v1/sessions", json={}, headers=headers).json()["id"] != first


def test_a_client_that_goes_before_its_body_is_there_has_asked_for_nothing(http: httpx.Client) -> None:
    before = len(http.get("/v1/sessions").json()["data"])
    host, port = http.base_url.host, http.base_url.port
    assert port is not None
    with socket.create_connection((host, port)) as connection:
        head = "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: gone\r\nContent-Length: 2\r\n\r\n"
        connection.sendall(head.encode() + b"{")
    wait_until(lambda: http.get("/health").is_success)
    assert len(http.get("/v1/sessions").json()["data"]) == before
    assert http.post("/v1/sessions", json={}, headers=keyed("gone")).status_code == 201
