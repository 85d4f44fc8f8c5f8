"""What a server writes on standard error: about requests, its start and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.processes import ServerProcess, serve_process

SECRET = "swordfish"
JSON = ("--log-format", "json")


def client_of(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=30)


def lines(server: ServerProcess) -> list[dict[str, Any]]:
    """Its log; standard output has one line more."""
    written = [line for line in server.output.read_text().splitlines() if not line.startswith("Djinn serves ")]
    return [json.loads(line) for line in written]


def requests(server: ServerProcess) -> list[dict[str, Any]]:
    return [line for line in lines(server) if line["logger"] == "app.web.middleware.access_log"]


def drain(server: ServerProcess) -> list[str]:
    """What the log says of it, once the server has ended."""
    assert server.exit_status(15) == 0
    return [line["message"] for line in lines(server) if line["message"].startswith("drain: ")]


def test_the_access_log_has_a_line_for_each_request_and_nothing_that_it_said(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state", "--access-log", *JSON) as server, client_of(server) as http:
        session = http.post("/v1/sessions", json={"metadata": {"name": SECRET}}, headers={"X-Request-Id": "r1"}).json()[
            "id"
        ]
        body = {"prompt": SECRET, "max_tokens": 2, "stream": True}
        http.post(f"/v1/sessions/{session}/generate", json=body, headers={"X-Request-Id": "r2"})
        bound = {"model": "tiny-llama", "prompt": SECRET, "max_tokens": 1}
        http.post("/v1/completions", json=bound, headers={"X-Session-ID": SECRET, "X-Request-Id": "r3"})
        http.get(f"/v1/sessions/{SECRET}?{SECRET}=1", headers={"X-Request-Id": "r4"})
        http.request(SECRET.upper(), f"/{SECRET}", headers={"X-Request-Id": "r5"})
        server.terminate()
        found = {line["request_id"]: line for line in requests(server)}
        assert SECRET not in server.output.read_text().lower()
    asked = {name: (line["method"], line["path"], line["status"]) for name, line in found.items()}
    assert asked == {
        "r1": ("POST", "/v1/sessions", 201),
        "r2": ("POST", "/v1/sessions/{session_id}/generate", 200),
        "r3": ("POST", "/v1/completions", 200),
        "r4": ("GET", "/v1/sessions/{session_id}", 422),
        "r5": (None, None, 404),
    }
    assert found["r5"]["message"].startswith("127.0.0.1 - - 404 ")
    assert found["r1"]["session"] == found["r2"]["session"] == session
    assert found["r3"]["session"].startswith("ses_")
    assert "session" not in found["r4"]
    for line in found.values():
        assert line["duration_ms"] > 0
        assert line["client"] == "127.0.0.1"


def test_a_refused_websocket_is_no_error(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state", "--access-log", "--api-key", SECRET, *JSON) as server:
        with pytest.raises(InvalidStatus), connect(f"{server.url.replace('http', 'ws')}/v1/responses"):
            pass
        server.terminate()
        assert [(line["path"], line["status"]) for line in requests(server)] == [("/v1/responses", 401)]
        assert [line for line in lines(server) if line["level"] == "error"] == []


def test_requests_are_not_logged_unless_they_are_asked_for(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state", *JSON) as server, client_of(server) as http:
        http.get("/v1/models").raise_for_status()
        server.terminate()
        assert requests(server) == []


def test_what_takes_time_is_said_at_the_start(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state", *JSON, own_engine=True) as server:
        server.terminate()
        said = [re.sub(r"\d+\.\d s", "N s", line["message"]) for line in lines(server)]
    assert "imported PyTorch and the engine in N s" in said
    assert "loaded: weights in N s, kernels and room for KV in N s" in said


def test_what_has_come_back_is_said_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serve_process(folder, *JSON) as server, client_of(server) as http:
        session = http.post("/v1/sessions").json()["id"]
        http.post("/v1/sessions").raise_for_status()
        turn = {"token_ids": [5] * 20, "max_tokens": 5, "ignore_eos": True}
        http.post(f"/v1/sessions/{session}/generate", json=turn).raise_for_status()
        server.kill()
        assert not any("back from" in line["message"] for line in lines(server))
    with serve_process(folder, *JSON) as server:
        (line,) = [each["message"] for each in lines(server) if "back from" in each["message"]]
    assert line == "sessions back from the journal: 2, with 25 tokens; expired meanwhile: 0"


def test_each_step_of_a_drain_is_said(tmp_path: Path) -> None:
    body = {"token_ids": [5, 6], "max_tokens": 1000, "ignore_eos": True, "stream": True}
    flags = ("--drain-timeout-s", "0.2", *JSON)
    with serve_process(tmp_path / "state", *flags) as server, client_of(server) as http:
        session = http.post("/v1/sessions").json()["id"]
        with connect_sse(http, "POST", f"/v1/sessions/{session}/generate", json=body) as source:
            stream = source.iter_sse()
            next(stream)
            os.kill(server.pid, signal.SIGTERM)
            *_, finished = stream
        kept = 2 + len(finished.json()["token_ids"]) - 1  # what was sampled last is not computed yet
        first, second, *beside, port, last = drain(server)
        assert [first, second, port, last] == [
            "drain: new sessions and turns are refused; over within 48.2 s; a second signal ends the server at once",
            "drain: turns that run or wait: 1, for at most 0.2 s; paused ones, which are cancelled: 0",
            "drain: the port is closed; answers under way have 5 s",
            "drain: over; changes that the journal lacks: 0",
        ]
        assert sorted(beside) == [  # KV is written beside the end of turns
            f"drain: sessions with KV on disk: 1, with {kept} tokens; sessions that lose KV: 0, with 0 tokens",
            "drain: turns that came to their end: 0; cancelled: 1",
        ]


def test_lines_of_the_engines_process_have_the_same_form(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state", *JSON, own_engine=True) as server:
        server.terminate()
        loggers = {line["logger"] for line in lines(server)}
    assert "app.web.server" in loggers
    assert any(name.startswith("app.gpu.") for name in loggers)


def test_a_malformed_request_is_a_line_like_all_others(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state", *JSON) as server:
        url = httpx.URL(server.url)
        with socket.create_connection((url.host, url.port or 0)) as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 400")
        server.terminate()
        assert [line["logger"] for line in lines(server) if line["level"] == "warning"] == ["uvicorn.error"]
