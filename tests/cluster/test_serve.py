"""`djinn cluster serve`: two replicas that know each other, behind one address."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from app.cli import main
from app.domain.session_ids import home_of
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
def test_a_session_moves_between_replicas_and_nobody_behind_the_front_door_sees_it(
    cluster: httpx.Client, tmp_path: Path
) -> None:
    one = open_session(cluster)
    home = home_of(one)
    assert home in ("a", "b")
    other = "b" if home == "a" else "a"
    before = generate(cluster, one, PROMPT)
    moved = cluster.post(f"/v1/sessions/{one}/move", json={"replica": other})
    assert moved.status_code == 200, moved.text
    assert moved.json()["replica"] == other
    after = generate(cluster, one, [7, 8])
    assert after["usage"]["cached_tokens"] >= len(PROMPT)
    twin = open_session(cluster)
    assert generate(cluster, twin, PROMPT)["token_ids"] == before["token_ids"]
    assert generate(cluster, twin, [7, 8])["token_ids"] == after["token_ids"]
    assert (tmp_path / "cluster" / "cluster.key").stat().st_mode & 0o077 == 0


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [["--standby"]])
def test_who_stands_by_goes_on_with_the_sessions_of_a_replica_that_is_killed(
    cluster: httpx.Client, tmp_path: Path
) -> None:
    one = open_session(cluster)
    before = generate(cluster, one, PROMPT)
    home = home_of(one)
    assert home is not None
    while len(serving := _processes(tmp_path / "cluster" / home)) < 2:
        time.sleep(0.2)
    serving[0].kill()
    deadline = time.monotonic() + START_S
    while cluster.get(f"/v1/sessions/{one}").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert serving[1].is_running()
    after = generate(cluster, one, [7, 8])
    twin = open_session(cluster)
    assert generate(cluster, twin, PROMPT)["token_ids"] == before["token_ids"]
    assert generate(cluster, twin, [7, 8])["token_ids"] == after["token_ids"]


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
    try:
        status = main(["cluster", "serve", "--control", "processes", *TINY, *flags])
    except SystemExit as ended:
        status = ended.code
    told = " ".join(capsys.readouterr().err.split())
    assert (status, words in told) == (2, True), told
