"""`djinn cluster serve`: two replicas that know each other, behind one address, and one that stands by."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from app.cli import main
from app.cluster.keeper import GO, READY, USAGE_ERROR
from app.domain.session_ids import home_of
from app.web.server import ENGINE_LOST
from tests.cluster.pair import PROMPT, free_port, generate, open_session

TINY = ("--model", "random:tiny-llama", "--device", "cpu", "--kv-device", "8MiB", "--kv-host", "8MiB")
START_S = 120


@pytest.fixture
def flags() -> list[str]:
    """What the cluster is started with, beside a tiny model."""
    return []


@pytest.fixture
def cluster(tmp_path: Path, flags: list[str]) -> Iterator[httpx.Client]:
    port = free_port()
    command = [sys.executable, "-P", "-m", "app", "cluster", "serve", "--control", "processes", *TINY, *flags]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--state-dir", str(tmp_path)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            _wait(http, process, tmp_path)
            yield http
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()


def _wait(http: httpx.Client, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if http.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError((folder / "log").read_text())


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [["--standby"]])
def test_sessions_move_and_outlive_a_replica_and_nobody_behind_the_front_door_sees_it(
    cluster: httpx.Client, tmp_path: Path
) -> None:
    one = open_session(cluster)
    home = home_of(one)
    assert home in ("a", "b")
    said = [generate(cluster, one, PROMPT)["token_ids"]]
    other = "b" if home == "a" else "a"
    moved = cluster.post(f"/v1/sessions/{one}/move", json={"replica": other})
    assert (moved.status_code, moved.json()["replica"]) == (200, other)
    after = generate(cluster, one, [7, 8])
    assert after["usage"]["cached_tokens"] >= len(PROMPT)
    said.append(after["token_ids"])
    assert (tmp_path / "cluster" / "cluster.key").stat().st_mode & 0o077 == 0
    while len(serving := _processes(tmp_path / "cluster" / other)) < 2:
        time.sleep(0.2)
    serving[0].kill()
    deadline = time.monotonic() + START_S
    while cluster.get(f"/v1/sessions/{one}").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert serving[1].is_running()
    said.append(generate(cluster, one, [9])["token_ids"])
    twin = open_session(cluster)
    assert said == [generate(cluster, twin, prompt)["token_ids"] for prompt in (PROMPT, [7, 8], [9])]


def _processes(folder: Path) -> list[psutil.Process]:
    """The servers of a state folder, the oldest first."""
    found = [process for process in psutil.process_iter(["cmdline"]) if str(folder) in (process.info["cmdline"] or ())]
    return sorted(found, key=psutil.Process.create_time)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [["--prefill-replicas", "1", "--prefill-apart-tokens", "64"]])
def test_a_replica_computes_the_long_prompts_of_another(cluster: httpx.Client) -> None:
    session = open_session(cluster)
    assert home_of(session) == "a"
    long = [token_id % 200 + 10 for token_id in range(200)]
    assert generate(cluster, session, long)["usage"]["cached_tokens"] >= len(long) - 1
    came = re.findall(r'djinn_prompts_apart_total{.*came="whole".*} (\S+)', cluster.get("/metrics").text)
    assert sum(map(float, came)) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill-replicas=2"], "--prefill-replicas must be from 0 to 1"),
        (["--prefill-replicas=-1"], "--prefill-replicas must be from 0 to 1"),
        (["--prefill-replicas=1", "--state-dir=none"], "--prefill-replicas needs a --state-dir"),
        (["--role=prefill"], "role: needs peers"),
        (["--replica=a"], "--replica"),
        (["--peers=x"], "--peers"),
        (["--cluster-key-file=x"], "--cluster-key-file"),
    ],
)
def test_what_no_cluster_takes_is_refused(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    status: str | int | None
    try:
        status = main(["cluster", "serve", "--control", "processes", *TINY, *flags])
    except SystemExit as ended:
        status = ended.code
    told = " ".join(capsys.readouterr().err.split())
    assert (status, words in told) == (2, True), told


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


@pytest.mark.long
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
