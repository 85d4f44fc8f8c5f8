"""`djinn demo`: agents come to a server of its own, and Ctrl-C ends everything."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.processes import hear_interrupts

SHOWN = re.compile(r"Djinn is at (http://\S+):")
WAIT_S = 100


@pytest.fixture
def demo() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "app", "demo", "--model", "random:tiny-llama"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_interrupts) as process:
        yield process
        if process.poll() is None:
            process.terminate()


@pytest.mark.long
def test_agents_come_and_go_with_the_server(demo: subprocess.Popen[str]) -> None:
    assert demo.stdout is not None
    shown = SHOWN.match(demo.stdout.readline())
    assert shown is not None
    deadline = time.monotonic() + WAIT_S
    while not any(each["tokens"] for each in httpx.get(f"{shown[1]}/v1/sessions", timeout=30).json()["data"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert httpx.get(shown[1], timeout=30).status_code == 200
    started = psutil.Process(demo.pid).children(recursive=True)
    assert len(started) >= 2
    demo.send_signal(signal.SIGINT)
    assert demo.wait(WAIT_S) == 130
    assert psutil.wait_procs(started, timeout=WAIT_S)[1] == []


@pytest.mark.long
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="only Linux ends a process whose parent has died")
def test_a_demo_that_is_killed_leaves_nothing(demo: subprocess.Popen[str]) -> None:
    assert demo.stdout is not None
    assert SHOWN.match(demo.stdout.readline()) is not None
    started = psutil.Process(demo.pid).children(recursive=True)
    assert started
    demo.kill()
    assert psutil.wait_procs(started, timeout=WAIT_S)[1] == []


@pytest.mark.long
def test_a_server_that_does_not_start_says_why() -> None:
    command = [sys.executable, "-m", "app", "demo", "--model", "random:huge"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 2
    assert "tiny-llama" in ended.stderr
