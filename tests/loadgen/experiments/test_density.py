"""The whole load generator against a real server: spoken to as Djinn and as an OpenAI server."""

import csv
import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from loadgen.cli import main
from loadgen.experiments.density.report import DensityReport
from loadgen.load.trace import read_trace, trace_sha256
from tests.errors import error_response
from tests.loadgen.experiments.conftest import interrupt, raw_result, result, sessions_on
from tests.loadgen.stubs import Flaky, serving
from tests.serving import serve

AGENTS, TURNS, CONTEXT, RESUME, COMPLETION = 4, 3, 60, 20, 6
LOAD = f"""
    --agents {AGENTS} --turns {TURNS} --context {CONTEXT} --resume-tokens {RESUME} --completion-tokens {COMPLETION}
    --system-tokens 16 --rate 2 --think 1:2 --time-scale 0.05 --seed 3
""".split()


def density(output: Path, *arguments: str) -> int:
    return main(["density", *LOAD, "--output", str(output), *arguments])


def only_run(target: dict[str, Any]) -> dict[str, Any]:
    """What was recorded of a target that ran the trace once."""
    run: dict[str, Any]
    (run,) = target["runs"]
    return run


@pytest.fixture(scope="module")
def folder(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run of both targets left."""
    folder = tmp_path_factory.mktemp("results")
    targets = ["--target", f"djinn={url}", "--target", f"plain={url}#tiny-llama", "--api-key", "plain=sesame"]
    assert density(folder, *targets) == 0
    return folder


@pytest.fixture(scope="module")
def compared(folder: Path) -> dict[str, Any]:
    return raw_result(folder, DensityReport)


def test_every_turn_of_both_targets_is_recorded_and_is_as_planned(compared: dict[str, Any], url: str) -> None:
    one, other = compared["targets"]
    assert [target["server"]["protocol"] for target in (one, other)] == ["djinn", "openai"]
    assert one["prompts_sha256"] == other["prompts_sha256"]
    for target in (one, other):
        run, summary = only_run(target), target["summary"]
        turns = {(turn["agent"], turn["turn"]) for turn in run["turns"]}
        assert turns == set(product(range(AGENTS), range(TURNS)))
        assert run["failures"] == []
        assert summary["turns_completed"] == AGENTS * TURNS
        assert summary["ttft_first_s"]["count"] == AGENTS
        assert summary["ttft_resumed_s"]["count"] == AGENTS * (TURNS - 1)
        assert summary["completion_tokens"] == AGENTS * TURNS * COMPLETION
        last = dict.fromkeys(range(AGENTS), -1.0)
        for turn in sorted(run["turns"], key=lambda turn: turn["turn"]):
            assert turn["cost"]["prompt_tokens"] == CONTEXT + turn["turn"] * (RESUME + COMPLETION)
            assert 0 < turn["token_times_s"][0] <= turn["token_times_s"][-1] <= turn["latency_s"]
            assert last[turn["agent"]] < turn["due_s"] <= turn["sent_s"] + 1e-3
            last[turn["agent"]] = turn["sent_s"] + turn["latency_s"]
        assert max(last.values()) <= summary["duration_s"] <= run["samples"][-1]["at_s"]
        assert all(each["running"] >= 0 <= each["waiting"] and 0 <= each["kv_used"] <= 1 for each in run["samples"])
    assert sessions_on(url) == []


def test_a_djinn_server_is_told_of_every_pause_and_tells_where_time_went(compared: dict[str, Any]) -> None:
    """Both have room for all agents. A prefix cache keeps whole blocks, of 16 tokens."""
    djinn, plain = compared["targets"]
    resumed = AGENTS * (TURNS - 1)
    assert [signal["phase"] for signal in only_run(djinn)["signals"]] == ["io_wait"] * resumed
    assert djinn["summary"]["signal_s"]["count"] == djinn["summary"]["wake_up_s"]["count"] == resumed
    for turn in only_run(djinn)["turns"]:
        assert set(turn["cost"]["resume_ms"]) == {"queue", "restore", "prefill"}
        assert sum(turn["cost"]["resume_ms"].values()) <= 1000 * turn["token_times_s"][0]
    assert only_run(plain)["signals"] == []
    assert (plain["summary"]["signal_s"], plain["summary"]["wake_up_s"]) == (None, None)
    assert {turn["cost"]["resume_ms"] for turn in only_run(plain)["turns"]} == {None}
    assert djinn["summary"]["recomputed_tokens"] == 0
    assert 0 <= plain["summary"]["recomputed_tokens"] <= 16 * resumed


def test_the_files_have_every_turn_and_no_key(folder: Path) -> None:
    raw_result(folder, DensityReport, "Side by side", "Time to first token, resumed turns", "4 agents, 2 a second")
    found = result(folder, DensityReport)
    (path,) = folder.glob("density-*.json")
    assert "sesame" not in path.read_text() + path.with_suffix(".html").read_text()
    assert found.command[:4] == ("python", "-m", "loadgen", "density")
    assert "plain=***" in found.command
    with path.with_suffix(".csv").open(newline="") as file:
        assert [line["error"] for line in csv.DictReader(file)] == [""] * (2 * AGENTS * TURNS)


def test_a_trace_is_run_again(folder: Path, url: str, tmp_path: Path) -> None:
    (trace,) = folder.glob("trace-*.jsonl")
    again = ["--trace", str(trace), "--system-tokens", "16", "--output", str(tmp_path)]
    assert main(["density", *again, "--target", f"djinn={url}"]) == 0
    raw_result(tmp_path, DensityReport, "trace-")
    before, after = result(folder, DensityReport), result(tmp_path, DensityReport)
    assert before.trace_sha256 == after.trace_sha256 == trace_sha256(read_trace(trace))
    assert after.targets[0].summary.turns_completed == AGENTS * TURNS


def test_results_are_shown_again_alone_and_beside_each_other(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = folder.glob("density-*.json")
    old, new, wide = (tmp_path / f"{name}.json" for name in ("old", "new", "wide"))
    written = json.loads(path.read_text())
    old.write_text(path.read_text())
    new.write_text(json.dumps({**written, "targets": written["targets"][:1]}))
    wide.write_text(json.dumps({**written, "machine": {**written["machine"], "flags": ["sve"]}}))
    for files, words in (([old], "Side by side"), ([old, new], "runs compared")):
        out = tmp_path / f"{len(files)}"
        assert main(["report", *map(str, files), "--output", str(out)]) == 0
        (page,) = out.glob("report-*.html")
        assert words in page.read_text()
        assert f"{AGENTS * TURNS} of {AGENTS * TURNS}" in capsys.readouterr().out
    for other, message in ((wide, "come from different processors"), (tmp_path / "nowhere.json", "cannot read")):
        assert main(["report", str(old), str(other), "--output", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*"))


def test_what_the_server_moved_is_counted_and_told_can_be_chosen_and_texts_come_from_a_file(
    url: str, tmp_path: Path
) -> None:
    """Agents that say that they are away for half a second leave the device and come back to it."""
    texts = tmp_path / "texts.jsonl"
    messages = [{"role": "system", "content": "Be brief. " * 5}, {"role": "user", "content": "Where is my flight?"}]
    texts.write_text(json.dumps({"id": "a", "messages": messages}))
    away = f"--agents 2 --turns 2 --time-scale 1 --think 0.5:0.5 --rate inf --signals ready --texts {texts}"
    assert density(tmp_path, *away.split(), "--target", f"djinn={url}") == 0
    found = raw_result(tmp_path, DensityReport)
    (djinn,) = found["targets"]
    run, swaps = only_run(djinn), djinn["summary"]["swaps"]
    assert Counter(signal["phase"] for signal in run["signals"]) == {"io_wait": 2, "ready": 2}
    assert (run["failures"], found["texts"]["name"]) == ([], "texts.jsonl")
    assert max(sum(sample["sessions"].values()) for sample in run["samples"]) >= 1
    assert set(swaps) == {"out", "in", "to_disk", "from_disk"}
    for way in ("out", "in"):
        assert swaps[way]["count"] >= 1
        assert swaps[way]["bytes_per_s"] == pytest.approx(swaps[way]["bytes"] / swaps[way]["seconds"])


def test_a_key_opens_a_server_and_failed_turns_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(max_sessions=2, api_keys=("secret",)) as url:
        arguments = ("--rate", "inf", "--target", f"djinn={url}")
        assert density(tmp_path, *arguments) == 2
        assert density(tmp_path, *arguments, "--api-key", "djinn=secret") == 1
    found = raw_result(tmp_path, DensityReport, "RateLimited")
    assert "secret" not in json.dumps(found)
    summary = found["targets"][0]["summary"]
    assert summary["turn_errors"] == {"RateLimited": 2}
    assert (summary["turns_completed"], summary["turns_failed"], summary["turns_not_run"]) == (6, 2, 4)
    assert "RateLimited 2" in capsys.readouterr().out


class Deaf(Flaky):
    """Takes no signal and closes no session."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.away_ms: list[float] = []
        """For how long agents have said that they will be away."""

    async def _answer(self, request: Request) -> Response:
        if request.method == "DELETE":
            return error_response(422, "field_out_of_range")
        if not request.url.path.endswith("/phase"):
            return await super()._answer(request)
        self.away_ms.append((await request.json())["resume_in_ms"])
        return error_response(409, "wrong_state")


def test_what_fails_between_turns_is_reported_and_its_agents_go_on(tmp_path: Path) -> None:
    """They think for 50 to 100 ms."""
    with serve() as url, serving(door := Deaf(url)) as address:
        assert density(tmp_path, "--target", f"djinn={address}") == 1
    summary = raw_result(tmp_path, DensityReport)["targets"][0]["summary"]
    assert (summary["turns_completed"], summary["turn_errors"]) == (AGENTS * TURNS, {})
    # One session more is opened before the clock starts.
    assert summary["other_errors"] == {"Conflict": AGENTS * (TURNS - 1), "Unprocessable": AGENTS + 1}
    assert 0 < max(door.away_ms) <= 100


def test_repeats_have_texts_of_their_own_and_a_spread_and_a_warm_up_is_not_measured(url: str, tmp_path: Path) -> None:
    """A server that keeps what it has seen would else answer the second run from its prefix cache."""
    arguments = ["--agents", "2", "--turns", "2", "--repeats", "2", "--warmup", "600", "--seed", "77"]
    assert density(tmp_path, *arguments, "--target", f"a={url}#tiny-llama") == 0
    (target,) = raw_result(tmp_path, DensityReport)["targets"]
    first, second = ([turn for turn in run["turns"] if turn["turn"] == 0] for run in target["runs"])
    assert len(first) == len(second) == 2
    assert all(turn["cost"]["cached_tokens"] <= 16 for turn in second)  # the system text has 16 tokens
    assert target["summary"]["turns_planned"] == target["summary"]["turns_completed"] == 8
    assert target["spread"]["turns_completed"]["values"] == [4.0, 4.0]
    assert (target["summary"]["ttft_first_s"], target["summary"]["tokens_per_s"]) == (None, 0.0)


@pytest.mark.long
def test_an_interrupted_run_leaves_what_it_measured(url: str, tmp_path: Path) -> None:
    """The agents think for an hour after their first turn: Ctrl-C comes in between."""
    arguments = [*LOAD, "--time-scale", "1", "--rate", "inf", "--think", "3600:3600", "--output", str(tmp_path)]

    def thinking() -> bool:
        """They say so once their turn is recorded."""
        return sum(session.info.phase == "io_wait" for session in sessions_on(url)) == AGENTS

    output = interrupt(["density", "--target", f"djinn={url}", *arguments], thinking)
    summary = raw_result(tmp_path, DensityReport)["targets"][0]["summary"]
    assert summary["interrupted"]
    assert (summary["turns_completed"], summary["turns_not_run"]) == (AGENTS, AGENTS * (TURNS - 1))
    assert "interrupted" in output
    assert sessions_on(url) == []
