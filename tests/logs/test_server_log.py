"""What a server writes on standard error: about requests, its start and its end."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.orderly import serve_thread
from tests.processes import ServerProcess, serve_process

SECRET = "swordfish"
JSON = ("--log-format", "json")


def lines(server: ServerProcess) -> list[dict[str, Any]]:
    """Its log; standard output has one line more."""
    written = [line for line in server.output.read_text().splitlines() if not line.startswith("Djinn serves ")]
    return [json.loads(line) for line in written]


def requests(server: ServerProcess) -> list[dict[str, Any]]:
    return [line for line in lines(server) if line["logger"] == "app.web.middleware.access_log"]


def test_the_access_log_has_a_line_for_each_request_and_nothing_that_it_said(tmp_path: Path) -> None:
    flags = ("--access-log", "--api-key", SECRET, *JSON)
    key = {"X-Api-Key": SECRET}
    with serve_process(tmp_path / "state", *flags) as server, httpx.Client(base_url=server.url, headers=key) as http:
        opened = http.post("/v1/sessions", json={"metadata": {"a": SECRET}}, headers={"X-Request-Id": "r1"})
        session = opened.json()["id"]
        body = {"prompt": SECRET, "max_tokens": 2, "stream": True}
        http.post(f"/v1/sessions/{session}/generate", json=body, headers={"X-Request-Id": "r2"})
        bound = {"model": "tiny-llama", "prompt": SECRET, "max_tokens": 1}
        http.post("/v1/completions", json=bound, headers={"X-Session-ID": SECRET, "X-Request-Id": "r3"})
        http.get(f"/v1/sessions/{SECRET}?{SECRET}=1", headers={"X-Request-Id": "r4"})
        http.request(SECRET.upper(), f"/{SECRET}", headers={"X-Request-Id": "r5"})
        with pytest.raises(InvalidStatus), connect(f"{server.url.replace('http', 'ws')}/v1/responses"):
            pass
        with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 400")
        server.terminate()
        *asked, socket_line = requests(server)
        assert SECRET not in server.output.read_text().lower()
        odd = [(each["logger"], each["level"]) for each in lines(server) if each["level"] in ("warning", "error")]
        assert odd == [("uvicorn.error", "warning")], "a malformed request is a line, a refused WebSocket no error"
    found = {line["request_id"]: line for line in asked}
    assert {name: (line["method"], line["path"], line["status"]) for name, line in found.items()} == {
        "r1": ("POST", "/v1/sessions", 201),
        "r2": ("POST", "/v1/sessions/{session_id}/generate", 200),
        "r3": ("POST", "/v1/completions", 200),
        "r4": ("GET", "/v1/sessions/{session_id}", 422),
        "r5": (None, None, 404),
    }
    assert (socket_line["path"], socket_line["status"]) == ("/v1/responses", 401)
    assert found["r5"]["message"].startswith("127.0.0.1 - - 404 ")
    assert found["r1"]["session"] == found["r2"]["session"] == session
    assert found["r3"]["session"].startswith("ses_")
    assert "session" not in found["r4"]
    for line in found.values():
        assert line["duration_ms"] > 0
        assert line["client"] == "127.0.0.1"


@pytest.mark.long
def test_the_start_is_told_in_one_form_by_both_processes(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state", *JSON, own_engine=True) as server:
        server.terminate()
        said = [re.sub(r"\d+\.\d s", "N s", line["message"]) for line in lines(server)]
        loggers = {line["logger"] for line in lines(server)}
    assert "imported PyTorch and the engine in N s" in said
    assert "loaded: weights in N s, kernels and room for KV in N s" in said
    assert "app.web.server" in loggers
    assert any(name.startswith("app.gpu.") for name in loggers)


def test_what_has_come_back_and_each_step_of_a_drain_is_said(tmp_path: Path) -> None:
    folder, flags = tmp_path / "state", ("--drain-timeout-s", "0.2")
    with serve_thread(folder, *flags) as (server, http):
        brief, long = (http.post("/v1/sessions").json()["id"] for _ in range(2))
        turn = {"token_ids": [5] * 20, "max_tokens": 5, "ignore_eos": True}
        http.post(f"/v1/sessions/{brief}/generate", json=turn).raise_for_status()
        assert "back from" not in server.log
        endless = {**turn, "max_tokens": 1000, "stream": True}
        with connect_sse(http, "POST", f"/v1/sessions/{long}/generate", json=endless) as source:
            stream = source.iter_sse()
            next(stream)
            server.tell()
            *_, finished = stream
        assert server.exit_status(60) == 0
        generated = len(finished.json()["token_ids"])
        first, second, *beside, port, last = [line for line in server.log.splitlines() if line.startswith("drain: ")]
    assert [first, second, port, last] == [
        "drain: new sessions and turns are refused; over within 48.2 s; a second signal ends the server at once",
        "drain: turns that run or wait: 1, for at most 0.2 s; paused ones, which are cancelled: 0",
        "drain: the port is closed; answers under way have 5 s",
        "drain: over; changes that the journal lacks: 0",
    ]
    kept = 20 + 5 - 1 + 20 + generated - 1  # what was sampled last is not computed yet
    assert sorted(beside) == [  # KV is written beside the end of turns
        f"drain: sessions with KV on disk: 2, with {kept} tokens; sessions that lose KV: 0, with 0 tokens",
        "drain: turns that came to their end: 0; cancelled: 1",
    ]
    with serve_thread(folder) as (server, http):
        http.get("/v1/models").raise_for_status()
        (line,) = [line for line in server.log.splitlines() if "back from" in line]
        assert line == f"sessions back from the journal: 2, with {kept + 2} tokens; expired meanwhile: 0"
        assert "/v1/models" not in server.log, "requests are not logged unless they are asked for"
