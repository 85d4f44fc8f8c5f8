"""`loadgen migrate`: sessions that move, made by hand and between real servers with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from loadgen.cli import main
from loadgen.experiments.migrate.journey import FirstToken, Journey
from loadgen.experiments.migrate.page import tables
from loadgen.experiments.migrate.plan import MigratePlan
from loadgen.experiments.migrate.report import Findings, MigrateReport, summarize
from loadgen.results.inputs import Server, Texts
from tests.loadgen.experiments.running import raw_result, result, sessions_on
from tests.serving import serve

SERVER = Server("A", "http://a", "djinn", None)


def journey(tokens: int, *, moved: tuple[int, ...] = (1, 2, 3), export_s: float = 0.25) -> Journey:
    """A move that takes `export_s` + 0.75 s, where computing anew takes 3 s."""
    return Journey(
        tokens=tokens,
        repeat=0,
        file_bytes=1000 * tokens,
        export_s=export_s,
        import_s=0.5,
        stayed=FirstToken(0.1, 6, (1, 2, 3)),
        moved=FirstToken(0.25, 6, moved),
        anew=FirstToken(3.0, tokens + 5, (7,)),
    )


def report(findings: Findings) -> MigrateReport:
    costs = summarize(findings.journeys)
    plan, texts = MigratePlan(), Texts("texts", "0" * 64)
    return MigrateReport(seed=0, plan=plan, texts=texts, origin=SERVER, goal=SERVER, findings=findings, costs=costs)


def test_an_answer_that_differs_is_no_success() -> None:
    found = report(Findings([journey(100), journey(100, moved=(1, 9, 3))]))
    (cost,) = found.costs
    assert (cost.equal, cost.same_tokens, cost.decoded_tokens) == (1, 3 + 1, 6)
    assert not found.succeeded
    (answers, *_) = tables(found)
    assert answers.rows[0][1:3] == ("1 of 2", "4 of 6")
    assert answers.rows[0][-1] == "DIFFERENT"


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


@pytest.mark.long
def test_where_kv_cannot_be_kept_it_is_computed_again_and_shown(origin: str, tmp_path: Path) -> None:
    """A server without a disk takes the tokens alone; the answer is the same."""
    with serve() as url:
        assert migrate(tmp_path, origin, url) == 0
    for journey in raw_result(tmp_path, MigrateReport)["findings"]["journeys"]:
        assert journey["moved"]["computed_tokens"] == journey["tokens"] + 1 + NEW
