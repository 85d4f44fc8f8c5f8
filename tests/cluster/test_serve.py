"""`djinn cluster serve`: two replicas that know each other, at one address, and one that stands by."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from app.cli import main
from app.domain.homes import home_of
from app.flags import READY, USAGE_ERROR
from app.replicas import GO
from app.web.server import ENGINE_LOST
from tests.cluster.pair import PROMPT, free_port
from tests.durability.restarting import generate, open_session
from tests.waiting import wait_until

TINY = ("--model", "random:tiny-llama", "--device", "cpu", "--kv-device", "8MiB", "--kv-host", "8MiB")
WAIT_S = 120.0


@contextmanager
def cluster(folder: Path, *flags: str) -> Iterator[httpx.Client]:
    """A client of a cluster that is ready, on connections that are not used again: each replica gets some."""
    port, log = free_port(), folder / "log"
    command = [sys.executable, "-P", "-m", "app", "cluster", "serve", *TINY, *flags]
    command += ["--port", str(port), "--state-dir", str(folder)]
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=60, limits=httpx.Limits(max_keepalive_connections=0)
        ) as http,
    ):

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            return "Djinn's cluster is" in log.read_text()

        try:
            wait_until(is_ready, WAIT_S)
            yield http
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(60) == 0, log.read_text()
            finally:
                process.kill()


def _processes(folder: Path) -> list[psutil.Process]:
    """The servers of a state folder, the oldest first."""
    found = [process for process in psutil.process_iter(["cmdline"]) if str(folder) in (process.info["cmdline"] or ())]
    return sorted(found, key=psutil.Process.create_time)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_sessions_move_and_outlive_a_replica_and_nobody_sees_it(tmp_path: Path) -> None:
    with cluster(tmp_path, "--standby") as http:
        one = open_session(http)
        home = home_of(one)
        assert home in ("a", "b")
        said = [generate(http, one, PROMPT)["token_ids"]]
        other = "b" if home == "a" else "a"
        moved = http.post(f"/v1/sessions/{one}/move", json={"replica": other})
        assert (moved.status_code, moved.json()["replica"]) == (200, other)
        after = generate(http, one, [7, 8])
        assert after["usage"]["cached_tokens"] >= len(PROMPT)
        said.append(after["token_ids"])
        assert (tmp_path / "cluster" / "cluster.key").stat().st_mode & 0o077 == 0
        folder = tmp_path / "cluster" / other
        wait_until(lambda: len(_processes(folder)) == 2)
        serving, standby = _processes(folder)
        serving.kill()
        said_of_it = (f"replica {other} is away", f"{other}: the server was killed")
        wait_until(lambda: any(each in http.get("/v1/findings").text for each in said_of_it), 10.0)
        path = f"/v1/sessions/{one}"
        wait_until(lambda: all(http.get(path).status_code == 200 for _ in range(16)))  # new connections go to either
        assert standby.is_running()
        said.append(generate(http, one, [9])["token_ids"])
        twin = open_session(http)
        assert said == [generate(http, twin, prompt)["token_ids"] for prompt in (PROMPT, [7, 8], [9])]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_replica_computes_the_long_prompts_of_another(tmp_path: Path) -> None:
    with cluster(tmp_path, "--prefill-replicas", "1", "--prefill-apart-tokens", "64") as http:
        tokens = itertools.count(3)

        def is_computed_there() -> bool:
            """Once `a` has heard of the other."""
            session = open_session(http)
            if home_of(session) != "a":  # the other does not know it yet
                return False
            usage = generate(http, session, [next(tokens)] * 200, max_tokens=1)["usage"]
            return bool(usage["cached_tokens"] >= 199)

        wait_until(is_computed_there)
        none = 'djinn_prompts_apart_total{came="whole"} 0.0'
        wait_until(lambda: is_computed_there() and none not in http.get("/metrics").text)  # either may answer


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill-replicas=2"], "--prefill-replicas must be from 0 to 1"),
        (["--prefill-replicas=-1"], "--prefill-replicas must be from 0 to 1"),
        (["--state-dir=none"], "--state-dir: a cluster needs a folder"),
        (["--replica-gpus=-1"], "--replica-gpus must be 0 or more"),
        (["--replica-gpus=40"], "2 replicas need 80 GPUs"),
        (["--role=prefill"], "role: needs cluster"),
        (["--replica=a"], "--replica"),
    ],
)
def test_what_no_cluster_takes_is_refused(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    status: str | int | None
    try:
        status = main(["cluster", "serve", *TINY, *flags])
    except SystemExit as ended:
        status = ended.code
    told = " ".join(capsys.readouterr().err.split())
    assert (status, words in told) == (2, True), told


@contextmanager
def standing_by(folder: Path, port: int = 0, model: str = "random:tiny-llama") -> Iterator[subprocess.Popen[bytes]]:
    flags = ["--model", model, "--device", "cpu", "--kv-device", "8MiB", "--port", str(port)]
    command = [sys.executable, "-P", "-m", "app", "serve", "--standby", *flags, "--state-dir", str(folder / "state")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def _engine_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    """The process in which its engine imports PyTorch."""
    server = psutil.Process(process.pid)
    wait_until(lambda: bool(server.children()))
    return server.children()[0]


def _stands_by(process: subprocess.Popen[bytes]) -> None:
    assert process.stderr is not None
    assert any(b"stands by" in line for line in process.stderr)


@pytest.mark.long
def test_it_leaves_port_and_folder_alone_until_it_is_told(tmp_path: Path) -> None:
    port = free_port()
    with standing_by(tmp_path, port) as waiting:
        assert waiting.stdin is not None
        assert waiting.stdout is not None
        assert waiting.stderr is not None
        engine = _engine_of(waiting)
        _stands_by(waiting)
        assert not (tmp_path / "state").exists()
        assert not psutil.Process(waiting.pid).net_connections()
        waiting.stdin.write(GO)
        waiting.stdin.flush()
        threading.Thread(target=waiting.stderr.read, daemon=True).start()  # it must not wait for a reader
        ready = READY.match(waiting.stdout.readline().decode())
        assert ready is not None
        assert ready[1].endswith(f":{port}")
        assert (tmp_path / "state").is_dir()
        assert engine.is_running()
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(WAIT_S) == 0


@pytest.mark.long
def test_what_is_wrong_with_its_model_is_said_when_it_is_wanted(tmp_path: Path) -> None:
    with standing_by(tmp_path, model="no/where") as waiting:
        _stands_by(waiting)
        said, errors = waiting.communicate(GO, WAIT_S)
        assert not said
        assert b"no/where" in errors
        assert waiting.returncode == USAGE_ERROR


@pytest.mark.long
@pytest.mark.parametrize("how", ["its engine dies", "input ends", "it is killed"])
def test_it_ends_with_its_engine(tmp_path: Path, how: str) -> None:
    with standing_by(tmp_path) as waiting:
        engine = _engine_of(waiting)
        assert waiting.stdin is not None
        if how == "its engine dies":
            _stands_by(waiting)
            engine.kill()
            assert waiting.wait(WAIT_S) == ENGINE_LOST
        elif how == "input ends":
            waiting.stdin.close()
            assert waiting.wait(WAIT_S) == 0
        else:
            os.kill(waiting.pid, signal.SIGKILL)
        engine.wait(WAIT_S)
