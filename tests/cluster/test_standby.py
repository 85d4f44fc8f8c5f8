"""A server that stands by: it has imported everything, and takes port and state folder when it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.cluster.keeper import GO, READY, USAGE_ERROR
from app.web.server import ENGINE_LOST
from tests.cluster.pair import free_port

WAIT_S = 100.0


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def model() -> str:
    return "random:tiny-llama"


@pytest.fixture
def waiting(tmp_path: Path, port: int, model: str) -> Iterator[subprocess.Popen[bytes]]:
    flags = ["--model", model, "--device", "cpu", "--kv-device", "8MiB", "--port", str(port)]
    command = [sys.executable, "-P", "-m", "app", "serve", "--standby", *flags, "--state-dir", str(tmp_path / "state")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def _engine_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    """The process in which its engine imports PyTorch."""
    deadline = time.monotonic() + WAIT_S
    while not (children := psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return children[0]


def _stands_by(process: subprocess.Popen[bytes]) -> None:
    """Wait until it does."""
    assert process.stderr is not None
    assert any(b"stands by" in line for line in process.stderr)


def _go(process: subprocess.Popen[bytes]) -> None:
    """Tell it to serve."""
    assert process.stdin is not None
    process.stdin.write(GO)
    process.stdin.flush()


def test_it_leaves_port_and_folder_alone_until_it_is_told(
    waiting: subprocess.Popen[bytes], port: int, tmp_path: Path
) -> None:
    engine = _engine_of(waiting)
    _stands_by(waiting)
    assert not (tmp_path / "state").exists()
    assert not psutil.Process(waiting.pid).net_connections()
    _go(waiting)
    assert waiting.stdout is not None
    assert waiting.stderr is not None
    threading.Thread(target=waiting.stderr.read, daemon=True).start()  # it must not wait for a reader
    ready = READY.match(waiting.stdout.readline().decode())
    assert ready is not None
    assert ready[1].endswith(f":{port}")
    assert (tmp_path / "state").is_dir()
    assert engine.is_running()
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(WAIT_S) == 0


@pytest.mark.long
@pytest.mark.parametrize("model", ["no/where"])
def test_what_is_wrong_with_its_model_is_said_when_it_is_wanted(waiting: subprocess.Popen[bytes]) -> None:
    _stands_by(waiting)
    said, errors = waiting.communicate(GO, WAIT_S)
    assert not said
    assert b"no/where" in errors
    assert waiting.returncode == USAGE_ERROR


@pytest.mark.long
def test_it_ends_if_its_engine_dies(waiting: subprocess.Popen[bytes]) -> None:
    engine = _engine_of(waiting)
    _stands_by(waiting)
    engine.kill()
    assert waiting.wait(WAIT_S) == ENGINE_LOST


@pytest.mark.long
def test_it_does_not_serve_with_an_engine_that_has_just_died(waiting: subprocess.Popen[bytes]) -> None:
    engine = _engine_of(waiting)
    _stands_by(waiting)
    os.kill(waiting.pid, signal.SIGSTOP)  # it must not notice before it is told
    engine.kill()
    _go(waiting)
    os.kill(waiting.pid, signal.SIGCONT)
    assert waiting.wait(WAIT_S) == ENGINE_LOST


@pytest.mark.long
@pytest.mark.parametrize("how", ["input ends", "it is killed"])
def test_its_engine_ends_with_it(waiting: subprocess.Popen[bytes], how: str) -> None:
    engine = _engine_of(waiting)
    assert waiting.stdin is not None
    if how == "input ends":
        waiting.stdin.close()
        assert waiting.wait(WAIT_S) == 0
    else:
        os.kill(waiting.pid, signal.SIGKILL)
    engine.wait(WAIT_S)
