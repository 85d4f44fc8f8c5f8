"""The white-box experiment against a real server with a tiny model: small, and whole."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import client
from loadgen.cli import main
from loadgen.targets.subject import HISTOGRAMS
from tests.processes import hear_interrupts
from tests.serving import serve

SEQUENCES, TOKENS, CONTEXT, OTHERS, REPEATS = 2, 64, 20, 3, 2
LOAD = f"""
    --sequences {SEQUENCES} --tokens {TOKENS} --context {CONTEXT} --others {OTHERS} --repeats {REPEATS}
    --pause-seconds 1 --scale 0.2 --seed 3
""".split()


def whitebox(output: Path, *arguments: str) -> int:
    return main(["whitebox", *LOAD, "--output", str(output), *arguments])


def result(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("whitebox-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of this file's own, so that what is left on it was left by the load generator."""
    with serve() as url:
        yield url


@pytest.fixture(scope="module")
def measured(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run. Speed is missed or met as the machine pleases, so that the exit code can be either."""
    folder = tmp_path_factory.mktemp("results")
    assert whitebox(folder, "--target", f"djinn={url}") in (0, 1)
    return folder


@pytest.fixture(scope="module")
def target(measured: Path) -> dict[str, Any]:
    (found,) = result(measured)["targets"]
    assert found["findings"]["failures"] == []
    assert isinstance(found, dict)
    return found


def test_every_token_is_the_same_with_a_pause_in_every_pass(target: dict[str, Any]) -> None:
    assert target["layers"] == [1, 2, 3]
    assert [(trial["layer"], trial["sequence"]) for trial in target["findings"]["trials"]] == [
        (layer, sequence) for layer in (1, 2, 3) for sequence in range(SEQUENCES)
    ]
    for trial in target["findings"]["trials"]:
        assert trial["plain"] == trial["paused"]
        assert (len(trial["plain"]), trial["prefill_pauses"], trial["decode_pauses"]) == (TOKENS, 1, TOKENS - 1)
    assert len(target["findings"]["saved"]) == 3 * SEQUENCES * TOKENS
    assert {saved["positions"] for saved in target["findings"]["saved"]} == {1, CONTEXT}


def test_steering_changes_what_is_said(target: dict[str, Any]) -> None:
    assert len(target["findings"]["steered"]) == 3 * SEQUENCES
    assert any(turn["differs_at"] is not None for turn in target["findings"]["steered"])


def test_round_trips_and_the_servers_clock(target: dict[str, Any]) -> None:
    calls = [trip["waited"] for trip in target["findings"]["round_trips"]]
    assert calls.count("resume to the next pause") == 3 * SEQUENCES * (TOKENS - 1)
    assert calls.count("read the activation") == calls.count("write it back") == 3 * SEQUENCES
    assert all(0 < trip["seconds"] < 5 for trip in target["findings"]["round_trips"])
    assert set(target["findings"]["histograms"]) == set(HISTOGRAMS)
    saves = target["findings"]["histograms"]["djinn_checkpoint_save_seconds"][-1]["count"]
    assert saves == len(target["findings"]["saved"]) + REPEATS


def test_others_decode_with_and_without_a_paused_session(target: dict[str, Any]) -> None:
    assert [(window["repeat"], window["paused"]) for window in target["findings"]["windows"]] == [
        (0, False),
        (0, True),
        (1, True),
        (1, False),
    ]
    for window in target["findings"]["windows"]:
        assert window["undisturbed"]
        assert window["tokens_per_s"] > 0
        assert len(window["tokens"]) == 1
    assert len(target["findings"]["rates"]) == SEQUENCES


def test_memory_is_given_back(target: dict[str, Any], url: str) -> None:
    before, during, after = (target["findings"]["memory"][when] for when in ("before", "during", "after"))
    assert (before["sessions"], during["sessions"], after["sessions"]) == (0, 1, 0)
    assert during["stack"]["checkpoint_bytes"] > 0
    assert during["data"]["device"]["owned_bytes"] > 0
    assert after["stack"]["checkpoint_bytes"] == after["data"]["device"]["owned_bytes"] == 0
    with client.Djinn(url, timeout=30) as djinn:
        assert list(djinn.sessions.list()) == []


def test_the_page_has_the_plots(measured: Path) -> None:
    (path,) = measured.glob("whitebox-*.html")
    text = path.read_text()
    assert text.count("<svg") == 2
    assert "Token accuracy with a pause in every pass" in text


def test_layers_can_be_chosen_and_a_miss_is_no_success(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steering by 1 changes nothing, and that misses its target."""
    assert whitebox(tmp_path, "--target", f"djinn={url}", "--layers", "0", "--scale", "1") == 1
    (found,) = result(tmp_path)["targets"]
    assert found["layers"] == [0]
    outcomes = {verdict["what"]: verdict["outcome"] for verdict in found["verdicts"]}
    assert outcomes["steered turns that say something else"] == "missed"
    assert outcomes["tokens that are the same with a pause in every pass"] == "met"
    captured = capsys.readouterr()
    assert "missed" in captured.out
    assert "token accuracy done" in captured.err


def test_a_server_too_full_for_the_others_is_a_failure_of_that_part(tmp_path: Path) -> None:
    with serve(max_sessions=2) as url:
        assert whitebox(tmp_path, "--target", f"djinn={url}") == 1
    (found,) = result(tmp_path)["targets"]
    assert [(failure["part"], failure["kind"]) for failure in found["findings"]["failures"]] == [
        ("throughput of the others", "RateLimited")
    ]
    assert len(found["findings"]["trials"]) == 3 * SEQUENCES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "a=http://127.0.0.1:9"], "measuring target a failed: GET http://127.0.0.1:9/"),
        (["--target", "a=URL#tiny-llama"], "this experiment is for Djinn servers"),
        (["--target", "a=URL", "--layers", "4"], "layers must be from 0 to 3"),
        (["--target", "a=URL", "--context", "2000"], "has room for 1024"),
        (["--target", "a=URL", "--tokens", "1"], "tokens must be at least 2"),
    ],
)
def test_what_cannot_start_says_why(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert whitebox(tmp_path, *(argument.replace("URL", url) for argument in arguments)) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_layers_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        whitebox(tmp_path, "--target", "a=b", "--layers", "1,x")
    assert ended.value.code == 2


@pytest.mark.long
def test_an_interrupted_run_leaves_what_it_measured(url: str, tmp_path: Path) -> None:
    """The pause would last an hour: Ctrl-C comes in its first window."""
    arguments = [*LOAD, "--layers", "1", "--sequences", "1", "--pause-seconds", "3600", "--output", str(tmp_path)]
    command = [sys.executable, "-m", "loadgen", "whitebox", "--target", f"djinn={url}", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=hear_interrupts
    ) as process:
        try:
            _wait_for_sessions(url, OTHERS)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130
    (found,) = result(tmp_path)["targets"]
    assert found["findings"]["interrupted"]
    assert (len(found["findings"]["trials"]), found["findings"]["windows"]) == (1, [])
    assert "interrupted" in output
    with client.Djinn(url, timeout=30) as djinn:
        assert list(djinn.sessions.list()) == []


def _wait_for_sessions(url: str, count: int) -> None:
    """Until so many sessions decode."""
    deadline = time.monotonic() + 60
    with client.Djinn(url, timeout=30) as djinn:
        while len(list(djinn.sessions.list(state="running"))) < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)
