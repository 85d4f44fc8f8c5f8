"""`loadgen kv`: what a session's KV is made of, codecs and links, and sessions that move to another server."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from loadgen.cli import main
from loadgen.experiments.kv.moving import JOURNEYS
from loadgen.report.report import Report
from tests.loadgen.experiments.conftest import result, sessions_on, value
from tests.serving import serve

TOKENS, REPEATS, DECODED = 64, 2, 8
LENGTHS = (32, 100)
LOAD = f"--tokens {TOKENS} --repeats {REPEATS} --decoded {DECODED} --seed 3 --link wire=0.001,bus=100".split()
MOVED = "moved sessions that say what they say where they were"


def kv(output: Path, *arguments: str) -> int:
    return main(["kv", *LOAD, "--lengths", "32,100", "--output", str(output), *arguments])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a disk: an imported session brings its KV."""
    with serve(state_dir=tmp_path_factory.mktemp("state"), kv_disk=16 << 20) as url:
        yield url


@pytest.fixture(scope="module")
def found(url: str, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The second of two runs, which finds what the first has left on the servers."""
    folder = tmp_path_factory.mktemp("results")
    with serve(state_dir=tmp_path_factory.mktemp("goal"), kv_disk=16 << 20) as goal:
        kv(folder / "first", "--target", f"djinn={url}", "--to", f"goal={goal}")
        assert kv(folder / "second", "--target", f"djinn={url}", "--to", f"goal={goal}") == 0
        assert sessions_on(url) == sessions_on(goal) == []
    headings = ("What KV is made of", "How a session grows", "How long a session takes to move", "What fp8 loses")
    return result(folder / "second", *headings, "wire", "bus", "NVLink 4")


def test_structure_codecs_and_fp8_are_measured(found: Report) -> None:
    assert value(found, "blocks of the server that are those of the file") == 1
    codecs = [row["codec"] for row in found.rows("Making it smaller")]
    assert codecs == ["zlib -1", "zlib -6", "zstd -3", "lz4", "fp8 e4m3"]
    for row in found.rows("What fp8 loses"):
        # Three bits of mantissa: half of the last is at most a sixteenth.
        assert 0 < float(row["relative error"].rstrip("%")) < 100 / 16
    assert 0 <= value(found, "tokens said with KV of eight bits as with its own") <= DECODED


def test_every_session_says_what_it_would_have_said_where_it_was(found: Report) -> None:
    """Only what is new is computed after a move, and the last token before it: its KV was not there yet."""
    journeys = found.rows(JOURNEYS)
    assert [each["tokens"] for each in journeys] == [length for length, _ in product(LENGTHS, range(REPEATS))]
    for journey in journeys:
        assert journey["same_tokens"] == journey["tokens_said"] == DECODED
        assert journey["computed_tokens"] == journey["computed_where_it_stayed"] < journey["computed_anew"]
    assert [value(found, MOVED, tokens=f"{length}") for length in LENGTHS] == [REPEATS, REPEATS]


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "part", "says"),
    [({}, "host to device", "no disk tier"), ({"kv_policy": "lru"}, "device to host", "its policy is lru")],
)
def test_what_a_server_cannot_do_is_said_and_the_rest_is_measured(
    settings: dict[str, Any], part: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(**settings) as url:
        assert kv(tmp_path, "--target", f"djinn={url}") == 1
    report = result(tmp_path, "NVLink 4")
    failure = report.failures[0]
    assert (failure.part, says in failure.message) == (part, True)
    assert len(report.rows("Making it smaller")) == 5
    assert "Not measured to the end" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(("settings", "says"), [({"seed": 1}, "model"), ({"block_size": 8}, "KV blocks")])
def test_a_server_that_refuses_is_reported(url: str, tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    with serve(**settings) as other:
        assert kv(tmp_path / "out", "--target", f"djinn={url}", "--to", f"other={other}") == 1
    assert sessions_on(url) == []
    failures = result(tmp_path / "out").failures
    assert {failure.kind for failure in failures} == {"Unprocessable"}
    assert says in failures[0].message
