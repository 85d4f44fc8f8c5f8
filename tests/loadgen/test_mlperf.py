"""MLPerf's traces of agents, replayed against a real server."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.cli import main
from loadgen.experiments.mlperf import CALLS, LEVELS
from tests.loadgen.experiments.conftest import result
from tests.serving import serve

MODEL = "tiny-llama"
CALL = {"id": "functions.bash:0", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
ROWS: list[dict[str, Any]] = [
    {"turn": 1, "role": "user", "content": "Fix it.", "system": "Be brief.", "tools": [BASH]},
    {"turn": 2, "role": "assistant", "reasoning_content": "Look.", "tool_calls": [CALL]},
    {
        "turn": 3,
        "role": "tool",
        "tool_results": [{"tool_call_id": CALL["id"], "content": "calc.py"}],
        "delay_seconds": 0.4,
    },
    {"turn": 4, "role": "assistant", "content": "Done."},
]

REQUEST = {"timestamp": 0, "input_length": 700, "output_length": 4, "hash_ids": [7, 8]}
ROUND = {"session_id": "s", "round_index": 0, "input_tokens_total": 300, "output_tokens": 4}
TIMES = [[{"event_type": "tool_result", "timestamp": f"2026-01-01T0{hour}:00:00Z"}] for hour in (5, 1)]
TALK = [{"role": role, "content": f"{role} says so"} for role in ("user", "assistant") * 2]
FORMS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "Mooncake": (512, [{**REQUEST, "timestamp": 300, "hash_ids": [7, 9]}, REQUEST]),
    "TraceLab": (300, [ROUND, {**ROUND, "round_index": 1, "input_tokens_total": 400}]),
    "conversations": (len(TALK[0]["content"]), [{"id": "c", "messages": TALK}]),
}
"""Two calls each, the second one with so many tokens of the first one, at least."""


def write_trace(path: Path, *conversations: tuple[str, list[dict[str, Any]]]) -> Path:
    lines = [json.dumps({"conversation_id": name, **row}) for name, rows in conversations for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_each_conversation_is_replayed_in_its_session_with_its_delays(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", ("one", ROWS), ("two", ROWS[::-1]))
    asked = ["--max-tokens", "4", "--dataset", str(trace)]
    with serve() as url, httpx.Client(base_url=url) as http:
        replay = ["mlperf", "--target", f"djinn={url}#{MODEL}", *asked]
        first, late, levels = (["--output", str(tmp_path / name)] for name in ("first", "late", "levels"))
        assert main([*replay, *first, "--salt", "--trajectories", "3", "--concurrency", "2"]) == 0
        report = result(tmp_path / "first", "Conversations at a time")
        [row] = report.rows(LEVELS)
        assert (row["calls"], row["failed"], len(report.rows(CALLS))) == (6, 0, 6)
        assert sum(call["completion_tokens"] for call in report.rows(CALLS)) == 24
        assert row["prompt tokens cached, %"] > 30, "of the second call, what the first one had"
        assert row["seconds"] > 0.8, "the delays of two conversations, one after the other"
        names = [http.get("/v1/sessions", params={"name": name}).json()["data"] for name in ("one", "two")]
        again = http.get("/v1/sessions", params={"name": "one__repeat_2"}).json()["data"]
        assert [len(found) for found in (*names, again)] == [1, 1, 1]
        told = http.post("/tokenize", json={"messages": [{"role": "system", "content": "Be brief."}]}).json()["count"]
        assert again[0]["usage"]["prompt_tokens"] > 2 * told, "with its salt"
        gone = ["--target", "gone=http://127.0.0.1:9#m"]
        assert main([replay[0], *gone, *replay[1:], *late, "--turn-timeout-s", "0.000001"]) == 1
        assert [row["failed"] for row in result(tmp_path / "late").rows(LEVELS)] == [2]
        assert [one.part for one in result(tmp_path / "late").failures] == ["gone"], "and nothing of the others is lost"
        short = ["--fit", "260", "--characters-per-token", "1", "--plain", "--exact", "--delay-scale", "0"]
        assert main([*replay, *levels, *short, "--concurrency", "1,2"]) == 0
        report = result(tmp_path / "levels")
        assert [(row["at once"], row["calls"]) for row in report.rows(LEVELS)] == [(1, 4), (2, 4)]
        assert all(call["completion_tokens"] == 4 for call in report.rows(CALLS))
        firsts = [call for call in report.rows(CALLS) if call["call"] == 0]
        assert all(call["cached_tokens"] < call["prompt_tokens"] / 2 for call in firsts), "levels share no prefix"
        bytewise = [*replay[:3], "--exact", "--max-tokens", "4", "--characters-per-token", "1", "--output"]
        for form, (shared, rows) in FORMS.items():
            trace = write_trace(tmp_path / form, ("", rows))
            assert main([*bytewise, str(tmp_path / f"of {form}"), "--dataset", str(trace)]) == 0
            one, other = result(tmp_path / f"of {form}").rows(CALLS)
            assert shared <= other["cached_tokens"] <= other["prompt_tokens"]
            assert form != "Mooncake" or (700 <= one["prompt_tokens"] < 800 and other["sent_s"] > 0.29)
        few = ["--fit", "300", "--calls", "2", "--trajectories", "2"]
        assert main([*bytewise, str(tmp_path / "small"), *few]) == 0
        assert len(result(tmp_path / "small").rows(CALLS)) == 4, "of the trace that needs no file"
    assert len(list((tmp_path / "levels").glob("*.png"))) == 4


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([{**ROWS[0], "role": "robot"}], "", "line 1: role: Input should be 'user', 'assistant' or 'tool'"),
        ([{**ROWS[0], "delay_seconds": -1}], "", "line 1: delay_seconds: Input should be greater"),
        (ROWS[1:2], "", "conversation one has no row of the user"),
        ([], "", "there is no conversation"),
        (ROWS, "--concurrency 0", "concurrency must be at least 1"),
        ([{"turn": 1, "role": "user", "content": "x"}], "--salt", "no system prompt to salt"),
        ([REQUEST, {**REQUEST, "hash_ids": [7]}], "", "request 2: hash_ids must be one for each 512 tokens"),
        ([{**ROUND, "output_tokens": -1}], "", "line 1: output_tokens: Input should be greater"),
        ([{"id": "c", "messages": TALK[:1]}], "", "no message of the assistant that answers another"),
        ([{"prompt": "x"}], "", "line 1: no known form: a line has hash_ids (Mooncake's), round_index (TraceLab's)"),
        ([ROUND, {**ROUND, "session_id": "t"}, ROUND], "", "session s: two rounds have round_index 0"),
        (
            [{**ROUND, "round_index": n, "timing_events": TIMES[n]} for n in (0, 1)],
            "",
            "round 1: timing_events end before those of round 0",
        ),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_one_line(
    rows: list[dict[str, Any]], options: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "t.jsonl", ("one", rows))
    assert main(["mlperf", "--target", "a=http://127.0.0.1:9#m", "--dataset", str(trace), *options.split()]) == 2
    assert says in capsys.readouterr().err.replace("\n", " ")
