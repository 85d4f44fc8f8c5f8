"""A client that asks again with its key after the server's death: what was done is told, and what was not is done."""

import json
import socket
from pathlib import Path
from typing import Any

import httpx
from httpx_sse import connect_sse
from openai import OpenAI
from openai.types.responses import Response, ResponseIncompleteEvent

from tests.durability.restarting import open_session, serving
from tests.processes import serve_process
from tests.waiting import wait_until

TURN: dict[str, Any] = {"prompt": "Once", "max_tokens": 24, "temperature": 1.0, "ignore_eos": True}
KEY = {"Idempotency-Key": "one"}


def history(http: httpx.Client, session: str) -> list[int]:
    found: list[int] = http.get(f"/v1/sessions/{session}/history").raise_for_status().json()["token_ids"]
    return found


def send_and_go(url: str, path: str, body: dict[str, Any], key: str) -> socket.socket:
    """Send a request with its key, and read none of its answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection, content = socket.create_connection((host, int(port))), json.dumps(body, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nIdempotency-Key: {key}\r\nContent-Type: application/json\r\n"
    connection.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def test_a_turn_that_was_done_before_the_kill_is_told_and_one_that_was_not_is_taken(tmp_path: Path) -> None:
    with serve_process(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        done, begun = open_session(http), open_session(http)
        path = f"/v1/sessions/{done}/generate"
        with send_and_go(server.url, path, TURN, "one"):
            wait_until(lambda: len(history(http, done)) > 24)
            wait_until(lambda: http.get(f"/v1/sessions/{done}").json()["state"] == "idle")
            expected = history(http, done)
            http.post("/v1/sessions").raise_for_status()  # the journal has what came before
        longer = {**TURN, "max_tokens": 900}
        with send_and_go(server.url, f"/v1/sessions/{begun}/generate", longer, "two"):
            wait_until(lambda: http.get(f"/v1/sessions/{begun}").json()["state"] == "running")
            asked = {"model": "tiny-llama", "input": "Hi", "background": True, "ignore_eos": True}
            lost = http.post("/v1/responses", json=asked).json()
            server.kill()
    with serve_process(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        answer = http.post(path, json=TURN, headers=KEY)
        assert answer.headers["idempotent-replayed"] == "true"
        assert answer.json()["token_ids"] == expected[-24:]
        assert answer.json()["usage"]["completion_tokens"] == 24
        assert history(http, done) == expected
        assert history(http, begun) == []
        failed = http.get(f"/v1/responses/{lost['id']}").json()
        assert (lost["status"], failed["status"], failed["error"]["code"]) == ("queued", "failed", "server_error")
        for _ in range(2):
            taken = http.post(f"/v1/sessions/{begun}/generate", json=longer, headers={"Idempotency-Key": "two"})
            assert len(taken.json()["token_ids"]) == 900


def test_after_a_restart_answers_are_the_same(tmp_path: Path) -> None:
    created = {"metadata": {"name": "kept"}}
    keys = {name: {"Idempotency-Key": name} for name in ("open", "fork", "turn", "stop", "stream")}
    with serving(tmp_path) as http:
        session = http.post("/v1/sessions", json=created, headers=keys["open"]).json()["id"]
        path = f"/v1/sessions/{session}"
        fork = http.post(f"{path}/fork", headers=keys["fork"]).json()["id"]
        turn = http.post(f"{path}/generate", json=TURN, headers=keys["turn"]).json()
        stopping = {**TURN, "stop": [turn["text"][4:6]], "seed": 1}
        stopped = http.post(f"{path}/generate", json=stopping, headers=keys["stop"]).json()
        streamed = read_stream(http, f"{path}/generate", keys["stream"])
        before = history(http, session)
    for _ in range(2):
        with serving(tmp_path) as http:
            assert http.post("/v1/sessions", json=created, headers=keys["open"]).json()["id"] == session
            assert http.post(f"{path}/fork", headers=keys["fork"]).json()["id"] == fork
            assert http.post(f"{path}/generate", json=TURN, headers=keys["turn"]).json() == turn
            assert http.post(f"{path}/generate", json=stopping, headers=keys["stop"]).json() == stopped
            assert read_stream(http, f"{path}/generate", keys["stream"]) == streamed
            assert history(http, session) == before
            other = http.post("/v1/sessions", json={}, headers=keys["open"])
            assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


def read_stream(http: httpx.Client, path: str, headers: dict[str, str]) -> tuple[str, Any]:
    """The text of a turn's tokens, and its end."""
    with connect_sse(http, "POST", path, json={**TURN, "stream": True}, headers=headers) as source:
        *tokens, end = source.iter_sse()
    return "".join(each.json()["text"] for each in tokens), end.json()


def test_after_a_restart_a_response_is_the_same(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": "tiny-llama", "input": "Hi", "max_output_tokens": 8}
    with serving(tmp_path) as http:
        first = http.post("/v1/responses", json=asked, headers=KEY).json()
        told = stream_response(http, asked)
    with serving(tmp_path) as http:
        assert http.post("/v1/responses", json=asked, headers=KEY).json() == first
        again = stream_response(http, asked)
        assert (again.id, again.output_text) == (told.id, told.output_text)
        assert len(http.get("/v1/sessions").json()["data"]) == 2


def stream_response(http: httpx.Client, asked: dict[str, Any]) -> Response:
    """The response of the last event."""
    with OpenAI(base_url=f"{http.base_url}/v1", api_key="none") as client:
        *_, last = client.responses.create(**asked, stream=True, extra_headers={"Idempotency-Key": "two"})
    assert isinstance(last, ResponseIncompleteEvent)
    return last.response
