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


def only_run(target: dict[str, Any]) -> dict[str, Any]:
    """What was recorded of a target that ran the trace once."""
    run: dict[str, Any]
    (run,) = target["runs"]
    return run


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
    assert compared["experiment"] == "density"
    assert [target["server"]["protocol"] for target in compared["targets"]] == ["djinn", "openai"]
    for target in compared["targets"]:
        run = only_run(target)
        turns = {(turn["agent"], turn["turn"]) for turn in run["turns"]}
        assert turns == {(agent, turn) for agent in range(AGENTS) for turn in range(TURNS)}
        assert run["failures"] == []
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
    turns = [turn for turn in only_run(target)["turns"] if turn["turn"] == 0]
    return sorted((turn["agent"], turn["due_s"], turn["cost"]["prompt_tokens"]) for turn in turns)


def test_contexts_grow_exactly_as_planned(compared: dict[str, Any]) -> None:
    for turn in only_run(compared["targets"][0])["turns"]:
        assert turn["cost"]["prompt_tokens"] == CONTEXT + turn["turn"] * (RESUME + COMPLETION)


def test_times_fit_together(compared: dict[str, Any]) -> None:
    for target in compared["targets"]:
        turns = only_run(target)["turns"]
        for turn in turns:
            assert 0 < turn["token_times_s"][0] <= turn["token_times_s"][-1] <= turn["latency_s"]
            assert turn["sent_s"] >= turn["due_s"] - 1e-3
            assert turn["sent_s"] + turn["latency_s"] <= target["summary"]["duration_s"]
        last = {turn["agent"]: -1.0 for turn in turns}
        for turn in sorted(turns, key=lambda turn: turn["turn"]):
            assert turn["due_s"] > last[turn["agent"]]
            last[turn["agent"]] = turn["sent_s"] + turn["latency_s"]


def test_a_djinn_server_is_told_of_every_pause_and_tells_where_time_went(compared: dict[str, Any]) -> None:
    djinn, plain = compared["targets"]
    assert compared["workload"]["signals"] == "eta"
    assert [signal["phase"] for signal in only_run(djinn)["signals"]] == ["io_wait"] * AGENTS * (TURNS - 1)
    assert djinn["summary"]["signal_s"]["count"] == AGENTS * (TURNS - 1)
    assert djinn["summary"]["wake_up_s"]["count"] == AGENTS * (TURNS - 1)
    assert all(0 < signal["round_trip_s"] < 5 for signal in only_run(djinn)["signals"])
    for turn in only_run(djinn)["turns"]:
        assert set(turn["cost"]["resume_ms"]) == {"queue", "restore", "prefill"}
        assert sum(turn["cost"]["resume_ms"].values()) <= 1000 * turn["token_times_s"][0]
    assert only_run(plain)["signals"] == []
    assert (plain["summary"]["signal_s"], plain["summary"]["wake_up_s"]) == (None, None)
    assert {turn["cost"]["resume_ms"] for turn in only_run(plain)["turns"]} == {None}


def test_both_servers_are_looked_at_while_they_run(compared: dict[str, Any]) -> None:
    """The OpenAI target is Djinn too, which has its serving metrics under vLLM's names."""
    for target in compared["targets"]:
        samples = only_run(target)["samples"]
        times = [sample["at_s"] for sample in samples]
        assert times[0] == 0.0
        assert times == sorted(times)
        assert times[-1] >= target["summary"]["duration_s"]
        assert all(sample["running"] >= 0 <= sample["waiting"] for sample in samples)
        assert all(0 <= sample["kv_used"] <= 1 for sample in samples)
    assert compared["targets"][1]["summary"]["peak_device_bytes"] is None


def test_what_the_server_moved_is_counted(url: str, tmp_path: Path) -> None:
    """An agent that says that it is away for a second leaves the device and comes back to it."""
    away = ["--agents", "1", "--turns", "2", "--time-scale", "1", "--think", "1:1", "--rate", "inf"]
    assert density(tmp_path, *away, "--target", f"djinn={url}", "--target", f"plain={url}#tiny-llama") == 0
    djinn, plain = result(tmp_path)["targets"]
    assert max(sum(sample["sessions"].values()) for sample in only_run(djinn)["samples"]) >= 1
    swaps = djinn["summary"]["swaps"]
    assert set(swaps) == {"out", "in", "to_disk", "from_disk"}
    for way in ("out", "in"):
        assert swaps[way]["count"] >= 1
        assert swaps[way]["bytes_per_s"] == pytest.approx(swaps[way]["bytes"] / swaps[way]["seconds"])
    assert plain["summary"]["swaps"] is None


def test_tokens_that_were_computed_again_are_told_or_follow_from_what_was_cached(compared: dict[str, Any]) -> None:
    """Both have room for all agents. A prefix cache keeps whole blocks, of 16 tokens."""
    djinn, plain = compared["targets"]
    assert djinn["summary"]["recomputed_tokens"] == 0
    assert 0 <= plain["summary"]["recomputed_tokens"] <= 16 * AGENTS * (TURNS - 1)


@pytest.mark.parametrize(("signals", "phases"), [("ready", {"io_wait": 2, "ready": 2}), ("none", {})])
def test_what_the_server_is_told_can_be_chosen(
    url: str, tmp_path: Path, signals: str, phases: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--agents", "2", "--turns", "2", "--signals", signals]
    assert density(tmp_path, *arguments, "--target", f"djinn={url}") == 0
    (target,) = result(tmp_path)["targets"]
    assert Counter(signal["phase"] for signal in only_run(target)["signals"]) == phases
    assert only_run(target)["failures"] == []
    assert ("signal round" in capsys.readouterr().out) == bool(phases)  # eighty columns break the name


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


def test_the_texts_can_come_from_a_file(url: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    messages = [{"role": "system", "content": "Be brief. " * 5}, {"role": "user", "content": "Where is my flight?"}]
    texts.write_text(json.dumps({"id": "a", "messages": messages}))
    assert density(tmp_path, "--agents", "2", "--target", f"djinn={url}", "--texts", str(texts)) == 0
    assert result(tmp_path)["texts"]["name"] == "texts.jsonl"


def test_repeats_have_texts_of_their_own_and_a_spread(url: str, tmp_path: Path) -> None:
    """A server that keeps what it has seen would else answer the second run from its prefix cache."""
    arguments = ["--agents", "2", "--turns", "2", "--repeats", "2", "--slo-ttft", "0.000001", "--slo-tpot", "60"]
    assert density(tmp_path, *arguments, "--seed", "77", "--target", f"a={url}#tiny-llama") == 0
    (target,) = result(tmp_path)["targets"]
    first, second = ([turn for turn in run["turns"] if turn["turn"] == 0] for run in target["runs"])
    assert len(first) == len(second) == 2
    assert all(turn["cost"]["cached_tokens"] <= 16 for turn in second)  # the system text has 16 tokens
    assert target["summary"]["turns_planned"] == 8
    assert target["spread"]["turns_completed"]["values"] == [4.0, 4.0]
    assert target["summary"]["goodput"]["share"] == 0.0  # no first token takes less than a microsecond


def test_turns_of_the_warm_up_are_counted_and_not_measured(url: str, tmp_path: Path) -> None:
    assert density(tmp_path, "--agents", "2", "--turns", "1", "--warmup", "600", "--target", f"a={url}") == 0
    summary = result(tmp_path)["targets"][0]["summary"]
    assert summary["turns_completed"] == 2
    assert (summary["ttft_first_s"], summary["tokens_per_s"]) == (None, 0.0)


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
        (["--target", "djinn=http://127.0.0.1:9"], "measuring target djinn failed: GET http://127.0.0.1:9/"),
        (["--target", "djinn=ftp://127.0.0.1:9"], "the URL of target djinn must be http://"),
        (
            ["--target", "djinn=127.0.0.1:9"],
            "the URL of a target begins with http://: --target djinn=http://127.0.0.1:9",
        ),
        (["--target", "a=URL", "--context", "2000"], "last turn ends at 2058 tokens"),
        (["--target", "a=URL#"], "NAME=URL#MODEL"),
        (["--target", "a=URL/v1/#tiny-llama"], "without /v1"),
        (["--target", "a=URL#gpt-9"], "no model gpt-9, only tiny-llama"),
        (["--target", "a=URL", "--target", "a=URL#tiny-llama"], "a name of its own: a, a"),
        (["--target", "a=URL", "--api-key", "b=secret"], "--api-key for no target that is up: b"),
        (["--target", "a=URL", "--api-key", "secret"], "--api-key is NAME=VALUE"),
        (["--target", "a=URL", "--api-key", "a=x", "--api-key", "a=y"], "--api-key is given twice for a"),
        (["--target", "a=http://me:secret@127.0.0.1:9"], "the URL of target a must be without a user"),
        (["--target", "a=URL", "--turns", "0"], "--turns must be at least 1"),
        (["--target", "a=URL", "--context", "9", "--system-tokens", "9"], "--context must be above --system-tokens"),
        (["--target", "a=URL", "--repeats", "0"], "repeats must be at least 1"),
        (["--target", "a=URL", "--warmup", "-1"], "warmup must be at least 0"),
        (["--target", "a=URL", "--turn-timeout", "0"], "--turn-timeout must be above 0"),
        (["--target", "a=URL", "--slo-ttft", "0"], "--slo-ttft must be above 0"),
        (["--target", "a=URL", "--texts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--target", "a=URL", "--output", "/dev/null/x"], "cannot write to /dev/null/x"),
    ],
)
def test_what_cannot_start_says_why(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert density(tmp_path, *(argument.replace("URL", url) for argument in arguments)) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "secret" not in told
    assert list(tmp_path.glob("density-*.json")) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--target", "a=b", "--think", "x"],
        ["--target", "a=b", "--agents", "few"],
        ["--target", "a=b", "--signals", "some"],
        ["--target", "a=b", "--api", "a=secret"],
    ],
)
def test_a_command_line_that_cannot_be_read(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        density(tmp_path, *arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_what_it_measured(url: str, tmp_path: Path, told: signal.Signals) -> None:
    """The agents think for an hour after their first turn: Ctrl-C or a `kill` comes in between."""
    arguments = [*LOAD, "--time-scale", "1", "--rate", "inf", "--think", "3600:3600", "--output", str(tmp_path)]
    command = [sys.executable, "-m", "loadgen", "density", "--target", f"djinn={url}", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_interrupts) as process:
        deadline = time.monotonic() + 30
        while _thinking(url) < AGENTS:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(told)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    summary = result(tmp_path)["targets"][0]["summary"]
    assert summary["interrupted"]
    assert (summary["turns_completed"], summary["turns_not_run"]) == (AGENTS, AGENTS * (TURNS - 1))
    assert "interrupted" in output
    assert _sessions(url) == []


def _thinking(url: str) -> int:
    """How many agents have said so, which they do once their turn is recorded."""
    return sum(session.info.phase == "io_wait" for session in _sessions(url))


def _sessions(url: str) -> list[client.Session]:
    with client.Djinn(url, timeout=30) as djinn:
        return list(djinn.sessions.list())
