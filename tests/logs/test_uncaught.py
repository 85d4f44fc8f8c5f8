"""What Python writes on standard error by itself has the form of the log."""

from __future__ import annotations

import json
import subprocess
import sys

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
