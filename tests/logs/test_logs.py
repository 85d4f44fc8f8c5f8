"""The format of log lines, and what a server logs of its requests, its start and its end."""

import json
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from httpx_sse import connect_sse
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from app.domain.values import SessionId
from app.logs import NAMED, REQUEST, JsonFormatter, Log, LogFormat, TextFormatter, configure, configured
from app.sessions.session import Session
from tests.orderly import serve_thread
from tests.processes import ServerProcess, serve_process

SESSION = "ses_" + "0" * 36
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def record(message: str, *arguments: object, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("app.web.server", logging.WARNING, "file.py", 1, message, arguments, None)
    vars(made).update(more)
    return made


def broken_by(message: str) -> logging.LogRecord:
    try:
        raise RuntimeError(message)
    except RuntimeError as error:
        return record("a", exc_info=(type(error), error, error.__traceback__))


@pytest.fixture
def scope() -> Iterator[dict[str, Any]]:
    """That of a request which the test works for."""
    made: dict[str, Any] = {"state": {"request_id": "req_1"}, "path_params": {}}
    token = REQUEST.set(made)
    yield made
    REQUEST.reset(token)


@pytest.mark.parametrize("form", get_args(LogFormat))
def test_a_line_names_the_replica_and_so_do_those_of_other_processes_of_it(form: LogFormat) -> None:
    log, root = Log(logging.INFO, form, "a"), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        root.handlers[:] = []
        configure(log)
        assert configured() == log
        (handler,) = root.handlers
        line = handler.format(record("here"))
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    if form == "text":
        assert re.fullmatch(rf"{TIME} WARNING djinn\[a\]: here", line)
    else:
        assert json.loads(line)["replica"] == "a"


def test_a_line_names_its_request_and_session(scope: dict[str, Any]) -> None:
    text = TextFormatter()
    assert re.fullmatch(rf"{TIME} WARNING djinn: 3 turns \(request req_1\)", text.format(record("%d turns", 3)))
    assert text.format(record("a")).endswith(": a (request req_1)")
    for foreign in ("a text of the caller's", "ses_1", "ses_" + "0" * 37):  # in a session's place of the path
        scope["path_params"] = {"session_id": foreign}
        assert all(foreign not in form.format(record("a")) for form in (text, JsonFormatter()))
    scope["path_params"] = {"session_id": SESSION}
    assert text.format(record("a")).endswith(f": a (request req_1, session {SESSION})")
    NAMED[SESSION] = named = Session(SessionId(SESSION), None, {"name": 'a "b"\n\ud800é\u202e'})
    end = rf'session "a \"b\"\n?é\u202e" …{SESSION[-8:]})'
    assert text.format(record("a")).endswith(end)
    assert json.loads(JsonFormatter().format(record("a")))["session_name"] == 'a "b"\n?é\u202e'
    named.owner = "a tenant"
    line = json.loads(JsonFormatter().format(record("%d turns", 3, fields={"status": 200})))
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    about = {"request_id": "req_1", "session": SESSION, "status": 200}
    assert line == {"level": "warning", "logger": "app.web.server", "message": "3 turns", **about}


@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
def test_a_line_without_a_request_names_none_but_may_be_about_a_session(form: logging.Formatter) -> None:
    assert "req" not in form.format(record("a"))
    assert SESSION in form.format(record("a", session=SESSION))
    line = form.format(record("%s", "a\nERROR djinn: forged\x1b[31m\x85\u202e\u2066\ud800"))
    assert not set("\n\x1b\x85\u202e\u2066").intersection(line)
    assert "\\u202e" in line
    bug = form.format(broken_by("broken"))
    assert "RuntimeError: broken" in bug
    assert "Traceback" in bug


def test_no_error_begins_a_line_of_text() -> None:
    forged = broken_by("a\n2027-01-15T08:00:00.123Z ERROR djinn: forged\x1b[31m")
    first, *below = TextFormatter().format(forged).split("\n")
    assert first.endswith("WARNING djinn: a")
    assert any("forged" in each for each in below)
    assert all(each.startswith("  ") for each in below)
    assert "\x1b" not in "".join(below)
    assert "broken ?" in json.loads(JsonFormatter().format(broken_by("broken \ud800")))["traceback"]


PROGRAM = """
import logging, threading, warnings
from app.logs import Log, configure

class Unfinished:
    def __del__(self):
        raise ValueError("at its end")

def fail():
    raise RuntimeError("in a thread")

configure(Log(logging.INFO, "json"))
warnings.warn("of a library", stacklevel=1)
thread = threading.Thread(target=fail, name="worker")
thread.start()
thread.join()
Unfinished()
raise LookupError("in the program")
"""


def test_warnings_and_uncaught_errors_are_lines_of_json() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    warned, thread, end, program = map(json.loads, done.stderr.splitlines())
    assert (warned["level"], warned["logger"]) == ("warning", "app.logs")
    assert warned["message"].startswith("UserWarning: of a library (<string>, line ")
    assert thread["message"] == "an error has ended the thread worker"
    assert "RuntimeError: in a thread" in thread["traceback"]
    assert "ValueError: at its end" in end["traceback"]
    assert (program["level"], program["message"]) == ("critical", "an error has ended the process")
    assert "LookupError: in the program" in program["traceback"]


SECRET = "swordfish"
JSON = ("--log-format", "json")


def lines(server: ServerProcess) -> list[dict[str, Any]]:
    """Its log; standard output has one line more."""
    written = [line for line in server.output.read_text().splitlines() if not line.startswith("Djinn serves ")]
    return [json.loads(line) for line in written]


def requests(server: ServerProcess) -> list[dict[str, Any]]:
    return [line for line in lines(server) if line["logger"] == "app.web.middleware"]


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
        said, loggers = ({line[field] for line in lines(server)} for field in ("message", "logger"))
    assert any(message.startswith("imported PyTorch and the engine in ") for message in said)
    assert any(message.startswith("loaded: weights in ") for message in said)
    assert "app.web.server" in loggers
    assert any(name.startswith("app.gpu.") for name in loggers)


def test_what_has_come_back_and_each_step_of_a_drain_is_said(tmp_path: Path) -> None:
    folder, flags = tmp_path / "state", ("--drain-timeout-s", "0.1667")
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
    assert first.startswith("drain: new sessions and turns are refused; over within ")
    assert second.startswith("drain: turns that run or wait: 1, for at most 0.2 s;")
    assert (port[:26], last) == ("drain: the port is closed;", "drain: over; changes that the journal lacks: 0")
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
