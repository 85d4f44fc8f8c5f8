"""`loadgen resume-latency` against a real server with a tiny model: small, and whole."""

from __future__ import annotations

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
from loadgen.experiments.resume_latency.findings import Way
from loadgen.experiments.resume_latency.report import ResumeReport
from loadgen.results.files import read_result
from tests.openai.reference import save_tiny_model
from tests.processes import hear_interrupts
from tests.serving import serve

LENGTHS, REPEATS, LAYERS = (40, 150), 2, 4
DEVICE_TOKENS = 256
STEP_TOKENS = 96
"""Less than the longer length: the server computes it in two parts."""


def resume(output: Path, *arguments: str) -> int:
    lengths = ",".join(map(str, LENGTHS))
    chosen = ["--lengths", lengths, "--repeats", str(REPEATS), "--seed", "3", "--output", str(output)]
    return main(["resume-latency", *chosen, *arguments])


def result(folder: Path) -> ResumeReport:
    (path,) = folder.glob("resume-latency-*.json")
    return read_result(path, ResumeReport)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """A server whose device holds little more than the longest session."""
    with serve(model=str(model), kv_device=f"1x{DEVICE_TOKENS}", max_step_tokens=STEP_TOKENS, max_running=8) as url:
        yield url


@pytest.fixture(scope="module")
def measured(url: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run. So small a model is computed about as soon as it is fetched: the exit code can be either."""
    folder = tmp_path_factory.mktemp("results")
    assert resume(folder, "--target", f"djinn={url}", "--model", str(model)) in (0, 1)
    return folder


def test_every_way_back_to_every_place_is_timed(measured: Path) -> None:
    (target,) = result(measured).targets
    assert target.findings.failures == []
    assert (target.num_layers, target.layers) == (LAYERS, (0, 1, 2, 3))
    taken = {(s.way, s.length, s.layer, s.repeat) for s in target.findings.samples}
    assert taken == {
        (way, length, layer, repeat)
        for way in Way
        for length in LENGTHS
        for layer in range(LAYERS)
        for repeat in range(REPEATS)
    }
    assert len(target.findings.samples) == len(taken)
    for sample in target.findings.samples:
        assert sample.token_s is not None
        assert 0 < sample.standing_s < 30
        assert sample.token_id is not None


def test_every_session_that_is_called_back_was_away(measured: Path) -> None:
    """The server says how long it copied each time: had the device had the KV still, nothing would have been."""
    (target,) = result(measured).targets
    called_back = [sample for sample in target.findings.samples if sample.way is Way.DJINN]
    for sample in called_back:
        assert sample.split is not None
        assert sample.split.copy_s > 0
        assert sample.split.checkpoint_s is not None
        assert sample.split.dispatch_s is not None
        assert 0 < sample.split.checkpoint_s < sample.standing_s


def test_next_tokens_are_those_of_transformers(measured: Path) -> None:
    (target,) = result(measured).targets
    assert [(each.length, each.layer) for each in target.summary.agreements] == [(40, 0), (150, 1)]
    assert all(each.djinn == each.transformers for each in target.summary.agreements)


def test_parts_before_the_last_one_are_whole_in_every_way(measured: Path) -> None:
    (target,) = result(measured).targets
    assert target.findings.passes == {40: 0, 150: STEP_TOKENS}


def test_the_page_says_what_is_timed(measured: Path) -> None:
    (path,) = measured.glob("resume-latency-*.html")
    text = path.read_text()
    assert text.count("<svg") == 4
    assert "Hand-written offload: what is timed" in text
    assert "(96 of 150 tokens)" in text
    assert len(list(measured.glob("resume-latency-*.png"))) == 4


def test_nothing_is_left_on_the_server(measured: Path, url: str) -> None:
    with client.Djinn(url, timeout=30) as djinn:
        assert list(djinn.sessions.list()) == []


def test_without_its_script_the_other_ways_are_measured(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadgen.experiments.resume_latency.offload.PROGRAM", tmp_path / "missing.py")
    assert resume(tmp_path, "--target", f"djinn={url}", "--lengths", "40", "--repeats", "1", "--depths", "100") == 1
    (target,) = result(tmp_path).targets
    assert [sample.way for sample in target.findings.samples] == [Way.RECOMPUTE, Way.DJINN]
    assert {failure.kind for failure in target.findings.failures} == {"OffloadFailed"}
    assert "missing.py" in target.findings.failures[0].message


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({"kv_policy": "lru"}, [], "does not listen to signals"),
        ({"kv_device": 64 << 20, "kv_host": 256 << 20}, [], "should hold little more than the longest"),
        ({}, ["--lengths", "2000"], "has room for"),
        ({}, ["--repeats", "0"], "repeats must be at least 1"),
        ({}, ["--model", "/nowhere"], "no model in /nowhere"),
    ],
)
def test_what_cannot_start_says_why(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    arguments: list[str],
    message: str,
) -> None:
    with serve(**settings) as url:
        assert resume(tmp_path, "--target", f"djinn={url}", *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_an_interrupted_run_leaves_what_it_measured(url: str, tmp_path: Path) -> None:
    """So many repeats that Ctrl-C comes long before their end."""
    command = [sys.executable, "-m", "loadgen", "resume-latency", "--target", f"djinn={url}", "--output", str(tmp_path)]
    command += ["--lengths", "40", "--depths", "100", "--repeats", "100"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=hear_interrupts
    ) as process:
        try:
            _wait_for_restores(url, 4)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    (target,) = result(tmp_path).targets
    assert target.findings.interrupted
    assert 0 < len(target.findings.samples) < 300
    with client.Djinn(url, timeout=30) as djinn:
        assert list(djinn.sessions.list()) == []


def _wait_for_restores(url: str, count: int) -> None:
    """Until so many sessions more have come back to the device."""
    deadline = time.monotonic() + 60
    with client.Djinn(url, timeout=30) as djinn:
        before = djinn.memory().moves["in"].count
        while djinn.memory().moves["in"].count < before + count:
            assert time.monotonic() < deadline
            time.sleep(0.02)
