"""`loadgen migrate`: sessions that move, made by hand and between real servers with a tiny model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

import client
from loadgen.cli import main
from loadgen.experiments.migrate.experiment import run_migrate
from loadgen.experiments.migrate.journey import FirstToken, Journey
from loadgen.experiments.migrate.page import tables
from loadgen.experiments.migrate.plan import MigratePlan
from loadgen.experiments.migrate.report import Findings, MigrateReport, summarize
from loadgen.load.corpus import python_topics
from loadgen.results.failures import Failure
from loadgen.results.files import read_result
from loadgen.results.inputs import Server, Texts
from loadgen.results.schema import json_schema
from loadgen.targets import TargetSpec
from tests.loadgen.stubs import until
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


def test_costs_by_length() -> None:
    short, long = summarize([journey(200), journey(100, export_s=0.5), journey(100), journey(100, export_s=9.0)])
    assert (short.tokens, short.moves, long.tokens, long.moves) == (100, 3, 200, 1)
    assert (short.export_s, short.move_s, long.move_s) == (0.5, 1.25, 1.0)
    assert long.gain == 3.0


def test_an_answer_that_differs_is_no_success() -> None:
    found = report(Findings([journey(100), journey(100, moved=(1, 9, 3))]))
    (cost,) = found.costs
    assert (cost.equal, cost.same_tokens, cost.decoded_tokens) == (1, 3 + 1, 6)
    assert not found.succeeded
    (answers, *_) = tables(found)
    assert answers.rows[0][1:3] == ("1 of 2", "4 of 6")
    assert answers.rows[0][-1] == "DIFFERENT"


def test_a_failure_and_an_interruption_are_no_success() -> None:
    assert report(Findings([journey(100)])).succeeded
    assert not report(Findings([journey(100)], [Failure("part", "Timeout", "silent")])).succeeded
    assert not report(Findings([journey(100)], interrupted=True)).succeeded


LENGTHS, REPEATS, NEW, DECODED = (32, 100), 2, 5, 12
LOAD = f"--lengths 32,100 --repeats {REPEATS} --new-tokens {NEW} --decoded {DECODED} --seed 3".split()


def migrate(output: Path, *urls: str) -> int:
    targets = [f"--target={name}={url}" for name, url in zip("ABC", urls, strict=False)]
    return main(["migrate", *LOAD, "--output", str(output), *targets])


def result(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("migrate-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


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
    found = result(measured)
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
        with client.Djinn(url) as djinn:
            assert list(djinn.sessions.list()) == []


def test_the_result_is_what_the_schema_says_and_has_a_page(measured: Path) -> None:
    (path,) = measured.glob("migrate-*.json")
    jsonschema.validate(result(measured), json_schema(MigrateReport))
    report = read_result(path, MigrateReport)
    assert report.succeeded
    assert (report.origin.name, report.goal.name) == ("A", "B")
    text = path.with_suffix(".html").read_text()
    for heading in ("What they said after the move", "What a move costs", "for each token of the history"):
        assert heading in text
    assert text.count("<svg") == len(list(measured.glob("migrate-*.png"))) == 2


@pytest.mark.long
@pytest.mark.parametrize(("settings", "says"), [({"seed": 1}, "model"), ({"block_size": 8}, "KV blocks")])
def test_a_server_that_refuses_is_reported(
    origin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], says: str
) -> None:
    with serve(**settings) as url:
        assert migrate(tmp_path / "out", origin, url) == 1
        with client.Djinn(origin) as djinn:
            assert list(djinn.sessions.list()) == []
    found = result(tmp_path / "out")
    assert [(failure["part"], failure["kind"]) for failure in found["findings"]["failures"]] == [
        ("32 tokens", "Unprocessable"),
        ("100 tokens", "Unprocessable"),
    ]
    assert says in found["findings"]["failures"][0]["message"]
    assert found["costs"] == []
    assert "Unprocessable" in capsys.readouterr().out


@pytest.mark.long
def test_where_kv_cannot_be_kept_it_is_computed_again_and_shown(origin: str, tmp_path: Path) -> None:
    """A server without a disk takes the tokens alone; the answer is the same."""
    with serve() as url:
        assert migrate(tmp_path, origin, url) == 0
    for journey in result(tmp_path)["findings"]["journeys"]:
        assert journey["moved"]["computed_tokens"] == journey["tokens"] + 1 + NEW


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "A=URL"], "migrate takes two targets"),
        (["--target", "A=URL", "--target", "A=URL"], "a name of its own"),
        (["--target", "A=URL", "--target", "B=http://127.0.0.1:9"], "measuring target B failed"),
        (["--target", "A=URL", "--target", "B=URL", "--lengths", "2000"], "has room for 1024"),
        (["--target", "A=URL", "--target", "B=URL", "--lengths", "5,5"], "lengths must be different"),
        (["--target", "A=URL", "--target", "B=URL", "--decoded", "0"], "decoded must be at least 1"),
    ],
)
def test_what_cannot_start_says_why(
    origin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    replaced = [argument.replace("URL", origin) for argument in arguments]
    assert main(["migrate", *replaced, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
async def test_an_interrupted_run_keeps_what_it_measured(origin: str, goal: str) -> None:
    """It would go on for long: it is interrupted after the first moves."""
    plan = MigratePlan(lengths=(32,), repeats=100, decoded=2)
    servers = TargetSpec("A", origin), TargetSpec("B", goal)
    run = asyncio.create_task(run_migrate(*servers, plan, python_topics(), Console(quiet=True)))
    with client.Djinn(goal) as djinn:
        arrived = djinn.memory().moves["from_disk"].count
        await until(lambda: djinn.memory().moves["from_disk"].count > arrived + 1)
    run.cancel()
    report = await run
    assert report.findings.interrupted
    assert 1 <= len(report.findings.journeys) < 100
    assert report.costs[0].moves == len(report.findings.journeys)
    assert not report.succeeded
