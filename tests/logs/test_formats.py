"""Lines of the log, whoever writes them."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any, get_args

import pytest

from app.logs.about import REQUEST
from app.logs.formats import JsonFormatter, Log, LogFormat, TextFormatter, configure, configured

SESSION = "ses_" + "0" * 36
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def record(message: str, *arguments: object, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("app.web.server", logging.WARNING, "file.py", 1, message, arguments, None)
    vars(made).update(more)
    return made


def broken_by(message: str) -> logging.LogRecord:
    """A line about a bug."""
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
    scope["path_params"] = {"session_id": SESSION}
    assert text.format(record("a")).endswith(f": a (request req_1, session {SESSION})")
    line = json.loads(JsonFormatter().format(record("%d turns", 3, fields={"status": 200})))
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    about = {"request_id": "req_1", "session": SESSION, "status": 200}
    assert line == {"level": "warning", "logger": "app.web.server", "message": "3 turns", **about}


@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
def test_a_line_without_a_request_names_none_but_may_be_about_a_session(form: logging.Formatter) -> None:
    assert "req" not in form.format(record("a"))
    assert SESSION in form.format(record("a", session=SESSION))
    line = form.format(record("%s", "a\nERROR djinn: forged\x1b[31m\x85\ud800"))
    assert "\n" not in line
    assert "\x1b" not in line
    bug = form.format(broken_by("broken"))
    assert "RuntimeError: broken" in bug
    assert "Traceback" in bug


@pytest.mark.parametrize("text", ["a text of the caller's", "ses_1", "ses_" + "0" * 37])
@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
def test_what_a_path_has_in_a_sessions_place_is_not_written(
    form: logging.Formatter, scope: dict[str, Any], text: str
) -> None:
    scope["path_params"] = {"session_id": text}
    assert text not in form.format(record("a"))


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
from app.logs.formats import Log, configure

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
    assert (warned["level"], warned["logger"]) == ("warning", "app.logs.uncaught")
    assert warned["message"].startswith("UserWarning: of a library (<string>, line ")
    assert thread["message"] == "an error has ended the thread worker"
    assert "RuntimeError: in a thread" in thread["traceback"]
    assert "ValueError: at its end" in end["traceback"]
    assert (program["level"], program["message"]) == ("critical", "an error has ended the process")
    assert "LookupError: in the program" in program["traceback"]
