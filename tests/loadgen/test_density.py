"""The whole load generator against a real server: spoken to as Djinn and as an OpenAI server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import client
from loadgen.cli import main
from tests.processes import hear_interrupts
from tests.serving import serve

AGENTS, TURNS, CONTEXT, RESUME, COMPLETION = 4, 3, 60, 20, 6
LOAD = f"""
    --agents {AGENTS} --turns {TURNS} --context {CONTEXT} --resume-tokens {RESUME} --completion-tokens {COMPLETION}
    --system-tokens 16 --rate 2 --think 1:2 --time-scale 0.05 --seed 3
""".split()


def density(output: Path, *arguments: str) -> int:
    return main(["density", *LOAD, "--output", str(output), *arguments])


def result(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("density-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of this file's own, so that what is left on it was left by the load generator."""
    with serve() as url:
        yield url


@pytest.fixture(scope="module")
def compared(url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of both targets."""
    folder = tmp_path_factory.mktemp("results")
    assert density(folder, "--target", f"djinn={url}", "--target", f"plain={url}#tiny-llama") == 0
    return result(folder)


def test_every_turn_of_both_targets_is_recorded(compared: dict[str, Any]) -> None:
    assert (compared["schema_version"], compared["experiment"]) == (1, "density")
    assert [target["protocol"] for target in compared["targets"]] == ["djinn", "openai"]
    for target in compared["targets"]:
        turns = {(turn["agent"], turn["turn"]) for turn in target["turns"]}
        assert turns == {(agent, turn) for agent in range(AGENTS) for turn in range(TURNS)}
        assert target["failures"] == []
        summary = target["summary"]
        assert summary["turns_completed"] == AGENTS * TURNS
        assert summary["ttft_first_s"]["count"] == AGENTS
        assert summary["ttft_resumed_s"]["count"] == AGENTS * (TURNS - 1)
        assert summary["completion_tokens"] == AGENTS * TURNS * COMPLETION


def test_both_targets_are_sent_the_same(compared: dict[str, Any]) -> None:
    one, other = compared["targets"]
    assert one["prompts_sha256"] == other["prompts_sha256"]
    assert _first_turns(one) == _first_turns(other)


def _first_turns(target: dict[str, Any]) -> list[tuple[int, float, int]]:
    turns = [turn for turn in target["turns"] if turn["turn"] == 0]
    return sorted((turn["agent"], turn["due_s"], turn["prompt_tokens"]) for turn in turns)


def test_contexts_grow_exactly_as_planned(compared: dict[str, Any]) -> None:
    for turn in compared["targets"][0]["turns"]:
        assert turn["prompt_tokens"] == CONTEXT + turn["turn"] * (RESUME + COMPLETION)


def test_times_fit_together(compared: dict[str, Any]) -> None:
    for target in compared["targets"]:
        for turn in target["turns"]:
            assert 0 < turn["ttft_s"] <= turn["latency_s"]
            assert turn["sent_s"] >= turn["due_s"] - 1e-3
            assert turn["sent_s"] + turn["latency_s"] <= target["summary"]["duration_s"]
        last = {turn["agent"]: -1.0 for turn in target["turns"]}
        for turn in sorted(target["turns"], key=lambda turn: turn["turn"]):
            assert turn["due_s"] > last[turn["agent"]]
            last[turn["agent"]] = turn["sent_s"] + turn["latency_s"]


def test_a_djinn_server_is_told_of_every_pause_and_tells_where_time_went(compared: dict[str, Any]) -> None:
    djinn, plain = compared["targets"]
    assert compared["workload"]["signals"] == "eta"
    assert [signal["phase"] for signal in djinn["signals"]] == ["io_wait"] * AGENTS * (TURNS - 1)
    assert djinn["summary"]["signal_s"]["count"] == AGENTS * (TURNS - 1)
    assert all(0 < signal["round_trip_s"] < 5 for signal in djinn["signals"])
    for turn in djinn["turns"]:
        assert set(turn["resume_ms"]) == {"queue", "restore", "prefill"}
        assert sum(turn["resume_ms"].values()) <= 1000 * turn["ttft_s"]
    assert plain["signals"] == []
    assert plain["summary"]["signal_s"] is None
    assert {turn["resume_ms"] for turn in plain["turns"]} == {None}


@pytest.mark.parametrize(("signals", "phases"), [("ready", {"io_wait": 2, "ready": 2}), ("none", {})])
def test_what_the_server_is_told_can_be_chosen(
    url: str, tmp_path: Path, signals: str, phases: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--agents", "2", "--turns", "2", "--signals", signals]
    assert density(tmp_path, *arguments, "--target", f"djinn={url}") == 0
    (target,) = result(tmp_path)["targets"]
    assert Counter(signal["phase"] for signal in target["signals"]) == phases
    assert target["failures"] == []
    assert "signal round trip" in capsys.readouterr().out


def test_no_session_is_left_behind(compared: dict[str, Any], url: str) -> None:
    assert compared["targets"]
    assert _sessions(url) == []


def test_failed_turns_are_counted_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(max_sessions=2) as url:
        assert density(tmp_path, "--rate", "inf", "--target", f"djinn={url}") == 1
    found = result(tmp_path)
    assert found["workload"]["rate"] is None
    summary = found["targets"][0]["summary"]
    assert summary["turn_errors"] == {"RateLimited": 2}
    assert (summary["turns_completed"], summary["turns_failed"], summary["turns_not_run"]) == (6, 2, 4)
    assert "RateLimited 2" in capsys.readouterr().out


def test_the_texts_can_come_from_a_trace(url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    messages = [{"role": "system", "content": "Be brief. " * 5}, {"role": "user", "content": "Where is my flight?"}]
    trace.write_text(json.dumps({"id": "a", "messages": messages}))
    assert density(tmp_path, "--agents", "2", "--target", f"djinn={url}", "--trace", str(trace)) == 0
    assert result(tmp_path)["corpus"]["name"] == "trace.jsonl"


def test_a_key_opens_a_server_and_is_not_written_down(tmp_path: Path) -> None:
    arguments = ("--agents", "1", "--turns", "1")
    with serve(api_keys=("secret",)) as url:
        target = f"djinn={url}"
        assert density(tmp_path, *arguments, "--target", target) == 2
        assert density(tmp_path, *arguments, "--target", target, "--api-key", "djinn=secret") == 0
    (path,) = tmp_path.glob("density-*.json")
    assert "secret" not in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "djinn=http://127.0.0.1:9"], "target djinn cannot be measured: GET http://127.0.0.1:9/"),
        (["--target", "djinn=127.0.0.1:9"], "target djinn: base_url must be http://"),
        (["--target", "127.0.0.1:9"], "NAME=URL"),
        (["--target", "a=URL", "--context", "2000"], "last turn ends at 2058 tokens"),
        (["--target", "a=URL#"], "NAME=URL#MODEL"),
        (["--target", "a=URL/v1/#tiny-llama"], "without /v1"),
        (["--target", "a=URL#gpt-9"], "no model gpt-9, only tiny-llama"),
        (["--target", "a=URL", "--target", "a=URL#tiny-llama"], "a name of its own: a, a"),
        (["--target", "a=URL", "--api-key", "b=secret"], "--api-key for no target: b"),
        (["--target", "a=URL", "--api-key", "secret"], "--api-key is NAME=KEY"),
        (["--target", "a=URL", "--turns", "0"], "turns must be at least 1"),
        (["--target", "a=URL", "--trace", "/nowhere.jsonl"], "cannot read trace /nowhere.jsonl"),
        (["--target", "a=URL", "--output", "/dev/null/x"], "cannot write to /dev/null/x"),
    ],
)
def test_what_cannot_start_says_why(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert density(tmp_path, *(argument.replace("URL", url) for argument in arguments)) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.glob("density-*.json")) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--target", "a=b", "--think", "x"],
        ["--target", "a=b", "--agents", "few"],
        ["--target", "a=b", "--signals", "some"],
    ],
)
def test_a_command_line_that_cannot_be_read(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        density(tmp_path, *arguments)
    assert ended.value.code == 2


def test_an_interrupted_run_leaves_what_it_measured(url: str, tmp_path: Path) -> None:
    """The agents think for an hour after their first turn: Ctrl-C comes in between."""
    arguments = [*LOAD, "--time-scale", "1", "--rate", "inf", "--think", "3600:3600", "--output", str(tmp_path)]
    command = [sys.executable, "-m", "loadgen", "density", "--target", f"djinn={url}", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_interrupts) as process:
        deadline = time.monotonic() + 30
        while _turns_done(url) < AGENTS:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)  # the server is done with the turns; now the load generator has read them too
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    summary = result(tmp_path)["targets"][0]["summary"]
    assert summary["interrupted"]
    assert (summary["turns_completed"], summary["turns_not_run"]) == (AGENTS, AGENTS * (TURNS - 1))
    assert "interrupted" in output
    assert _sessions(url) == []


def _turns_done(url: str) -> int:
    return sum(session.info.state == "idle" and session.info.usage.completion_tokens > 0 for session in _sessions(url))


def _sessions(url: str) -> list[client.Session]:
    with client.Djinn(url, timeout=30) as djinn:
        return list(djinn.sessions.list())
