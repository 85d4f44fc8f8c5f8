"""`loadgen migrate`: sessions that move, made by hand and between real servers with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from loadgen.cli import main
from loadgen.experiments.migrate.report import MigrateReport
from tests.loadgen.experiments.running import raw_result, result, sessions_on
from tests.serving import serve

LENGTHS, REPEATS, NEW, DECODED = (32, 100), 2, 5, 12
LOAD = f"--lengths 32,100 --repeats {REPEATS} --new-tokens {NEW} --decoded {DECODED} --seed 3".split()


def migrate(output: Path, *urls: str) -> int:
    targets = [f"--target={name}={url}" for name, url in zip("ABC", urls, strict=False)]
    return main(["migrate", *LOAD, "--output", str(output), *targets])


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    with serve() as url:
        yield url


@pytest.fixture(scope="module")
def goal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a disk: an imported session brings its KV."""
    with serve(state_dir=tmp_path_factory.mktemp("state"), kv_disk=16 << 20) as url:
        yield url


@pytest.fixture(scope="module")
def measured(origin: str, goal: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, of which the second finds what the first has left on the servers."""
    migrate(tmp_path_factory.mktemp("first"), origin, goal)
    folder = tmp_path_factory.mktemp("results")
    assert migrate(folder, origin, goal) == 0
    return folder


def test_every_session_says_what_it_would_have_said_where_it_was(measured: Path, origin: str, goal: str) -> None:
    """Only what is new is computed after a move, and the last token before it: its KV was not there yet."""
    found = raw_result(measured, MigrateReport, "What they said after the move", "for each token of the history")
    assert found["findings"]["failures"] == []
    journeys = found["findings"]["journeys"]
    assert [(each["tokens"], each["repeat"]) for each in journeys] == [*product(LENGTHS, range(REPEATS))]
    for journey in journeys:
        assert journey["moved"]["token_ids"] == journey["stayed"]["token_ids"]
        assert len(journey["moved"]["token_ids"]) == DECODED
        assert journey["moved"]["computed_tokens"] == journey["stayed"]["computed_tokens"] == NEW + 1
        assert journey["anew"]["computed_tokens"] == journey["tokens"] + NEW
    for cost in found["costs"]:
        assert (cost["moves"], cost["equal"], cost["same_tokens"]) == (REPEATS, REPEATS, REPEATS * DECODED)
    for url in (origin, goal):
        assert sessions_on(url) == []


@pytest.mark.long
@pytest.mark.parametrize(("settings", "says"), [({"seed": 1}, "model"), ({"block_size": 8}, "KV blocks")])
def test_a_server_that_refuses_is_reported(
    origin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], says: str
) -> None:
    with serve(**settings) as url:
        assert migrate(tmp_path / "out", origin, url) == 1
    assert sessions_on(origin) == []
    found = result(tmp_path / "out", MigrateReport)
    failures = [(failure.part, failure.kind) for failure in found.findings.failures]
    assert failures == [("32 tokens", "Unprocessable"), ("100 tokens", "Unprocessable")]
    assert says in found.findings.failures[0].message
    assert "Unprocessable" in capsys.readouterr().out
