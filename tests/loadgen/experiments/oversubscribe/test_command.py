"""`loadgen oversubscribe` against real servers with a tiny model: small, and whole."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import client
from loadgen.cli import main
from loadgen.experiments.oversubscribe.report import OversubscribeReport
from loadgen.results.files import read_result
from tests.processes import hear_interrupts
from tests.serving import serve

SESSIONS, CONTEXT, TURNS, TOKENS = 8, 96, 3, 4
DEVICE = f"2x{CONTEXT}"
LOAD = f"--sessions {SESSIONS} --context {CONTEXT} --turns {TURNS} --tokens {TOKENS} --checked 3 --seed 3".split()


def oversubscribe(output: Path, *arguments: str) -> int:
    return main(["oversubscribe", *LOAD, "--output", str(output), *arguments])


def result(folder: Path) -> OversubscribeReport:
    (path,) = folder.glob("oversubscribe-*.json")
    return read_result(path, OversubscribeReport)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose device holds a quarter of what the sessions grow to."""
    with serve(kv_device=DEVICE) as url:
        yield url


@pytest.fixture(scope="module")
def measured(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    assert oversubscribe(folder, "--target", f"djinn={url}") == 0
    return folder


def test_all_turns_complete_and_nothing_is_computed_again(measured: Path) -> None:
    (target,) = result(measured).targets
    assert target.findings.failures == []
    assert {(turn.session, turn.turn) for turn in target.findings.turns} == {
        (session, turn) for session in range(SESSIONS) for turn in range(TURNS)
    }
    assert all(len(turn.token_ids) == TOKENS for turn in target.findings.turns)
    assert target.summary.recomputed_tokens == 0


def test_demand_grows_to_four_devices_while_the_device_stays_within_its_own(measured: Path) -> None:
    (target,) = result(measured).targets
    samples, budget = target.findings.samples, target.findings.budget
    assert budget is not None
    assert samples[-1].demand_bytes == 4 * budget.device_bytes
    demands = [sample.demand_bytes for sample in samples]
    assert demands == sorted(demands)
    assert all(sample.device_bytes <= budget.device_bytes for sample in samples)
    assert samples[-1].host_bytes > 2 * budget.device_bytes


def test_sessions_say_alone_what_they_said_in_the_crowd(measured: Path) -> None:
    (target,) = result(measured).targets
    assert [check.session for check in target.findings.checks] == [0, 2, 5]
    for check in target.findings.checks:
        assert len(check.crowded) == TURNS * TOKENS
        assert check.crowded == check.alone


def test_the_page_has_the_memory_figure(measured: Path) -> None:
    (path,) = measured.glob("oversubscribe-*.html")
    text = path.read_text()
    assert text.count("<svg") == 2
    assert "all histories" in text
    assert len(list(measured.glob("oversubscribe-*.png"))) == 2


def test_nothing_is_left_on_the_server(measured: Path, url: str) -> None:
    with client.Djinn(url, timeout=30) as djinn:
        assert list(djinn.sessions.list()) == []


def test_the_seed_decides_the_texts(measured: Path, url: str, tmp_path: Path) -> None:
    assert oversubscribe(tmp_path, "--target", f"djinn={url}", "--checked", "0") == 0
    (one,), (other,) = result(measured).targets, result(tmp_path).targets
    assert one.prompts_sha256 == other.prompts_sha256


def test_past_the_host_sessions_go_to_disk(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serve(kv_device=DEVICE, kv_host=f"3x{CONTEXT}", kv_disk=64 << 20, state_dir=state) as url:
        assert oversubscribe(tmp_path, "--target", f"djinn={url}") == 0
    (target,) = result(tmp_path).targets
    assert target.summary.disk_bytes > 0
    assert target.summary.recomputed_tokens == 0
    assert target.summary.matching_tokens == 3 * TURNS * TOKENS


def test_without_lower_tiers_tokens_are_computed_again_and_are_the_same(tmp_path: Path) -> None:
    with serve(kv_device=DEVICE, kv_policy="none") as url:
        assert oversubscribe(tmp_path, "--target", f"djinn={url}") == 0
    (target,) = result(tmp_path).targets
    assert target.summary.recomputed_tokens > 0
    assert target.summary.matching_tokens == 3 * TURNS * TOKENS


def test_a_server_that_refuses_sessions_is_shown_with_its_error(tmp_path: Path) -> None:
    with serve(kv_device=DEVICE, max_sessions=6) as url:
        assert oversubscribe(tmp_path, "--target", f"djinn={url}", "--checked", "1") == 1
    (target,) = result(tmp_path).targets
    summary = target.summary
    assert summary.errors == {"RateLimited": 2}
    assert (summary.turns_completed, summary.turns_failed, summary.turns_not_run) == (18, 2, 4)
    assert len(target.findings.checks) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "2000"], "has room for"),
        (["--sessions", "0"], "sessions must be at least 1"),
    ],
)
def test_what_cannot_start_says_why(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert oversubscribe(tmp_path, "--target", f"djinn={url}", *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_an_interrupted_run_leaves_what_it_measured(url: str, tmp_path: Path) -> None:
    """So many sessions that Ctrl-C comes long before their end."""
    command = [sys.executable, "-m", "loadgen", "oversubscribe", "--target", f"djinn={url}", "--output", str(tmp_path)]
    command += [*LOAD, "--sessions", "300"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=hear_interrupts
    ) as process:
        try:
            _wait_for_sessions(url, 5)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    (target,) = result(tmp_path).targets
    assert target.findings.interrupted
    assert 0 < target.summary.turns_completed < 300 * TURNS
    assert target.summary.turns_not_run > 0
    assert target.findings.samples
    with client.Djinn(url, timeout=30) as djinn:
        assert list(djinn.sessions.list()) == []


def _wait_for_sessions(url: str, count: int) -> None:
    """Until so many sessions are open."""
    deadline = time.monotonic() + 60
    with client.Djinn(url, timeout=30) as djinn:
        while djinn.memory().sessions < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)
