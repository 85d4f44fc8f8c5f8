"""Starting and stopping real processes."""

import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from loadgen.processes.process import ServerFailedError, free_port, log_tail, running_server, spawn, stop_server

NOWHERE = "http://127.0.0.1:9"
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, file=open(sys.argv[2], "w"), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGUSR1))
print("ready", flush=True)
time.sleep(60)
"""
"""Does not end when it is asked to, but interrupts who asked."""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_that_ends_is_reported_with_its_last_words() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]

    with pytest.raises(ServerFailedError, match=r"status 1\n.*no such model"), running_server(command, {}, NOWHERE):
        pass


def test_the_environment_is_added_to_ours() -> None:
    command = [sys.executable, "-c", "import os, sys; sys.exit(os.environ['PEER'] + os.environ['PATH'])"]

    expected = re.escape(f"vllm{os.environ['PATH']}")
    with pytest.raises(ServerFailedError, match=expected), running_server(command, {"PEER": "vllm"}, NOWHERE):
        pass


def test_nothing_of_a_server_is_left_when_the_block_ends(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port), str(tmp_path / "child")]

    with running_server(command, {}, f"http://127.0.0.1:{port}") as session:
        child = int((tmp_path / "child").read_text())
        assert is_running(session)
        assert is_running(child)

    assert not is_running(session)
    assert not is_running(child)


def test_who_does_not_want_to_wait_leaves_nothing_behind() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with tempfile.TemporaryFile() as output:
            process = spawn([sys.executable, "-c", STUBBORN], {}, output)
            deadline = time.monotonic() + 30
            while log_tail(output) != "ready\n":
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with pytest.raises(KeyboardInterrupt):
                stop_server(process.pid)
            process.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not is_running(process.pid)


def test_the_end_of_a_log_is_read_while_it_is_written() -> None:
    with tempfile.TemporaryFile() as output:
        os.write(output.fileno(), b"one ")
        assert log_tail(output) == "one "
        os.write(output.fileno(), b"two")
        assert log_tail(output) == "one two"
