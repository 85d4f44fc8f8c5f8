"""The whole load generator against a real server: as Djinn, as an OpenAI server, and with sessions that pause."""

import csv
import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response

from loadgen.cli import main
from loadgen.experiments.density.rows import SAMPLES, SIGNALS
from loadgen.experiments.density.rows import TURNS as TURN_ROWS
from loadgen.experiments.whitebox.experiment import STEERED, TRIALS, WAITS, sign_test
from loadgen.load.trace import read_trace, trace_sha256
from loadgen.report.report import Report
from loadgen.targets.djinn import HISTOGRAMS
from tests.errors import error_response
from tests.loadgen.experiments.conftest import interrupt, result, sessions_on, value
from tests.loadgen.stubs import Flaky, serving
from tests.serving import serve

AGENTS, TURNS, CONTEXT, RESUME, COMPLETION = 4, 3, 60, 20, 6
LOAD = f"""
    --agents {AGENTS} --turns {TURNS} --context {CONTEXT} --resume-tokens {RESUME} --completion-tokens {COMPLETION}
    --system-tokens 16 --rate 2 --think 1:2 --time-scale 0.05 --seed 3
""".split()


def density(output: Path, *arguments: str) -> int:
    return main(["density", *LOAD, "--output", str(output), *arguments])


@pytest.fixture(scope="module")
def folder(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run of both targets left."""
    folder = tmp_path_factory.mktemp("results")
    targets = ["--target", f"djinn={url}", "--target", f"plain={url}#tiny-llama", "--api-key", "plain=sesame"]
    assert density(folder, *targets) == 0
    return folder


@pytest.fixture(scope="module")
def compared(folder: Path) -> Report:
    return result(folder, "Side by side", "Time to first token, resumed turns", "4 agents, 2 a second")


def test_every_turn_of_both_targets_is_recorded_and_is_as_planned(compared: Report, url: str) -> None:
    assert [server.protocol for server in compared.servers] == ["djinn", "openai"]
    assert len({compared.inputs[f"prompts_sha256 of {name}"] for name in ("djinn", "plain")}) == 1
    for name in ("djinn", "plain"):
        turns = [row for row in compared.rows(TURN_ROWS) if row["target"] == name]
        assert {(turn["agent"], turn["turn"]) for turn in turns} == set(product(range(AGENTS), range(TURNS)))
        assert value(compared, "turns completed", target=name) == AGENTS * TURNS
        assert sum(turn["resumed"] for turn in turns) == AGENTS * (TURNS - 1)
        last = dict.fromkeys(range(AGENTS), -1.0)
        for turn in sorted(turns, key=lambda turn: turn["turn"]):
            assert turn["completion_tokens"] == COMPLETION
            assert turn["prompt_tokens"] == CONTEXT + turn["turn"] * (RESUME + COMPLETION)
            assert 0 < turn["ttft_s"] <= turn["token_times_s"][-1] <= turn["latency_s"]
            assert last[turn["agent"]] < turn["due_s"] <= turn["sent_s"] + 1e-3
            last[turn["agent"]] = turn["sent_s"] + turn["latency_s"]
    assert sessions_on(url) == []


def test_a_djinn_server_is_told_of_every_pause_and_tells_where_time_went(compared: Report) -> None:
    """Both have room for all agents. A prefix cache keeps whole blocks, of 16 tokens."""
    resumed = AGENTS * (TURNS - 1)
    told = [(signal["target"], signal["phase"]) for signal in compared.rows(SIGNALS)]
    assert told == [("djinn", "io_wait")] * resumed
    djinn, plain = ([row for row in compared.rows(TURN_ROWS) if row["target"] == name] for name in ("djinn", "plain"))
    for turn in djinn:
        assert sum(turn[f"{part}_ms"] for part in ("queue", "restore", "prefill")) <= 1000 * turn["ttft_s"]
    assert {turn["queue_ms"] for turn in plain} == {None}
    assert sum(turn["recomputed_tokens"] for turn in djinn) == 0
    assert 0 <= sum(turn["recomputed_tokens"] for turn in plain) <= 16 * resumed


def test_the_files_have_every_turn_and_no_key(folder: Path, compared: Report) -> None:
    (path,) = folder.glob("density-*.json")
    assert "sesame" not in path.read_text() + path.with_suffix(".html").read_text()
    assert compared.command[:4] == ("python", "-m", "loadgen", "density")
    assert "plain=***" in compared.command
    with path.with_suffix(".csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * AGENTS * TURNS


def test_a_trace_is_run_again(folder: Path, compared: Report, url: str, tmp_path: Path) -> None:
    (trace,) = folder.glob("trace-*.jsonl")
    again = ["--trace", str(trace), "--system-tokens", "16", "--output", str(tmp_path)]
    assert main(["density", *again, "--target", f"djinn={url}"]) == 0
    after = result(tmp_path, "trace-")
    assert compared.inputs["trace_sha256"] == after.inputs["trace_sha256"] == trace_sha256(read_trace(trace))
    assert value(after, "turns completed") == AGENTS * TURNS


def test_results_are_shown_again_alone_and_beside_each_other(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = folder.glob("density-*.json")
    old, new, wide = (tmp_path / f"{name}.json" for name in ("old", "new", "wide"))
    written = json.loads(path.read_text())
    for file in (old, new):
        file.write_text(path.read_text())
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


def test_told_phases_can_be_chosen_and_texts_come_from_a_file(url: str, tmp_path: Path) -> None:
    """Agents that say that they are away for half a second leave the device and come back to it."""
    texts = tmp_path / "texts.jsonl"
    messages = [{"role": "system", "content": "Be brief. " * 5}, {"role": "user", "content": "Where is my flight?"}]
    texts.write_text(json.dumps({"id": "a", "messages": messages}))
    away = f"--agents 2 --turns 2 --time-scale 1 --think 0.5:0.5 --rate inf --signals ready --texts {texts}"
    assert density(tmp_path, *away.split(), "--target", f"djinn={url}") == 0
    found = result(tmp_path)
    assert Counter(signal["phase"] for signal in found.rows(SIGNALS)) == {"io_wait": 2, "ready": 2}
    assert found.texts is not None
    assert found.texts.name == "texts.jsonl"
    assert found.rows(SAMPLES)


def test_a_key_opens_a_server_and_failed_turns_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(max_sessions=2, api_keys=("secret",)) as url:
        arguments = ("--rate", "inf", "--target", f"djinn={url}")
        assert density(tmp_path, *arguments) == 2
        assert density(tmp_path, *arguments, "--api-key", "djinn=secret") == 1
    found = result(tmp_path, "RateLimited")
    (path,) = tmp_path.glob("density-*.json")
    assert "secret" not in path.read_text()
    assert value(found, "turns completed") == 6
    assert Counter(row["error"] for row in found.rows(TURN_ROWS) if row.get("error")) == {"RateLimited": 2}
    assert "RateLimited" in capsys.readouterr().out


class Deaf(Flaky):
    """Takes no signal and closes no session."""

    async def _answer(self, request: Request) -> Response:
        if request.method == "DELETE":
            return error_response(422, "field_out_of_range")
        if not request.url.path.endswith("/phase"):
            return await super()._answer(request)
        assert 0 < (await request.json())["resume_in_ms"] <= 100
        return error_response(409, "wrong_state")


def test_what_fails_between_turns_is_reported_and_its_agents_go_on(tmp_path: Path) -> None:
    """They think for 50 to 100 ms."""
    with serve() as url, serving(Deaf(url)) as address:
        assert density(tmp_path, "--target", f"djinn={address}") == 1
    found = result(tmp_path, "Conflict", "Unprocessable")
    assert value(found, "turns completed") == AGENTS * TURNS
    # One session more is opened before the clock starts.
    assert value(found, "errors between turns") == AGENTS * (TURNS - 1) + AGENTS + 1


def test_repeats_have_texts_of_their_own_and_a_warm_up_is_not_measured(url: str, tmp_path: Path) -> None:
    """A server that keeps what it has seen would else answer the second run from its prefix cache."""
    arguments = ["--agents", "2", "--turns", "2", "--repeats", "2", "--warmup", "600", "--seed", "77"]
    assert density(tmp_path, *arguments, "--target", f"a={url}#tiny-llama") == 0
    found = result(tmp_path)
    second = [row for row in found.rows(TURN_ROWS) if row["repeat"] == 1 and row["turn"] == 0]
    assert len(second) == 2
    assert all(turn["cached_tokens"] <= 16 for turn in second)  # the system text has 16 tokens
    assert value(found, "turns completed") == 8
    assert found.figure("TTFT, first, p50").spread is None


@pytest.mark.long
def test_an_interrupted_run_leaves_what_it_measured(url: str, tmp_path: Path) -> None:
    """The agents think for an hour after their first turn: Ctrl-C comes in between."""
    arguments = [*LOAD, "--time-scale", "1", "--rate", "inf", "--think", "3600:3600", "--output", str(tmp_path)]

    def thinking() -> bool:
        """They say so once their turn is recorded."""
        return sum(session.info.phase == "io_wait" for session in sessions_on(url)) == AGENTS

    output = interrupt(["density", "--target", f"djinn={url}", *arguments], thinking)
    found = result(tmp_path)
    assert found.interrupted
    assert value(found, "turns completed") == AGENTS
    assert "interrupted" in output
    assert sessions_on(url) == []


@pytest.mark.parametrize(("pairs", "first", "last"), [(3, 1, 3), (8, 1, 8), (9, 2, 8), (20, 6, 15)])
def test_the_bounds_of_a_median_are_those_of_the_tables(pairs: int, first: int, last: int) -> None:
    """As they are printed, for 95 %, in tables of the sign test; up to five pairs have none, and get all."""
    found = sign_test([float(number) for number in range(pairs, 0, -1)])
    assert found is not None
    assert (found.low, found.high) == (first, last)


SEQUENCES, TOKENS, PROMPT, OTHERS, REPEATS = 2, 24, 20, 3, 2
PAUSED_LOAD = f"""
    --sequences {SEQUENCES} --tokens {TOKENS} --context {PROMPT} --others {OTHERS} --repeats {REPEATS}
    --pause-seconds 0.4 --scale 0.2 --seed 3
""".split()


def whitebox(output: Path, *arguments: str) -> int:
    return main(["whitebox", *PAUSED_LOAD, "--output", str(output), *arguments])


@pytest.fixture(scope="module")
def found(url: str, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """One run. Speed is missed or met as the machine pleases, so that the exit code can be either."""
    folder = tmp_path_factory.mktemp("results")
    whitebox(folder, "--target", f"djinn={url}")
    report = result(folder, "Token accuracy with a pause in every pass")
    assert report.failures == ()
    return report


def test_every_token_is_the_same_with_a_pause_in_every_pass_and_others_decode_on(found: Report) -> None:
    trials = found.rows(TRIALS)
    assert [(t["layer"], t["sequence"]) for t in trials] == [(n, s) for n in (1, 2, 3) for s in range(SEQUENCES)]
    for trial in trials:
        assert trial["plain"] == trial["paused"]
        assert (len(trial["plain"]), trial["prefill_pauses"], trial["decode_pauses"]) == (TOKENS, 1, TOKENS - 1)
    assert any(turn["differs_at"] is not None for turn in found.rows(STEERED))
    assert value(found, "paused turns that end as they would have") == REPEATS


def test_round_trips_the_servers_clock_and_its_memory(found: Report, url: str) -> None:
    calls = Counter(row["waited"] for row in found.rows(WAITS))
    assert calls["resume to the next pause"] == 3 * SEQUENCES * (TOKENS - 1)
    assert calls["read the activation"] == calls["write it back"] == 3 * SEQUENCES
    assert {row[""] for row in found.rows("The server's own clock, milliseconds")} <= set(HISTOGRAMS)
    assert value(found, "memory that sessions hold afterwards beyond before") == 0
    assert sessions_on(url) == []
