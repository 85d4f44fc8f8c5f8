"""A small run on a real cluster of a tiny model, and what cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from loadgen.cli import main
from loadgen.experiments.cluster.report import ClusterReport
from loadgen.results.files import read_result
from loadgen.results.schema import json_schema

AGENTS, TURNS = 6, 6
LOAD = ["--agents", f"{AGENTS}", "--turns", f"{TURNS}", "--think", "1:3", "--rate", "6", "--context", "96"]
LENGTHS = ["--resume-tokens", "16", "--completion-tokens", "16", "--system-tokens", "32"]
DONE = ["--replicas", "2", "--routers", "owner,hash", "--moves-per-second", "4", "--kill-every", "3", "--kills", "1"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replicas, one of which is killed while sessions move."""
    folder = tmp_path_factory.mktemp("cluster")
    assert main(["cluster", *LOAD, *LENGTHS, *DONE, "--output", str(folder)]) == 0
    return folder


def result(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("cluster-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_cluster_whose_replica_is_killed_says_what_a_single_server_says(ran: Path) -> None:
    size, _ = result(ran)["sizes"]
    findings = size["findings"]
    assert (findings["wrong"], findings["lost"], findings["failures"]) == ([], [], [])
    assert findings["compared"] == size["summary"]["turns_completed"] == AGENTS * TURNS
    assert findings["owners"] == {"1": AGENTS}
    assert [fault["kind"] for fault in findings["faults"]] == ["kill"]
    assert all(move["bytes"] > 0 for move in findings["moves"])
    assert findings["moves"]
    assert findings["routing"]["owner"] > 0


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_same_agents_behind_a_hash_get_the_same_tokens_and_have_their_history_computed_again(ran: Path) -> None:
    _, hashed = result(ran)["sizes"]
    assert (hashed["router"], hashed["findings"]["wrong"]) == ("hash", [])
    assert hashed["findings"]["compared"] == hashed["summary"]["turns_completed"] == AGENTS * TURNS
    assert [fault["kind"] for fault in hashed["findings"]["faults"]] == ["kill"]
    assert hashed["findings"]["moves"] == []
    assert hashed["findings"]["cold"] > 0
    assert hashed["summary"]["recomputed_tokens"] > 0


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_result_is_what_the_schema_says_and_can_be_read_back(ran: Path) -> None:
    (path,) = ran.glob("cluster-*.json")
    jsonschema.validate(result(ran), json_schema(ClusterReport))
    assert read_result(path, ClusterReport).succeeded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "0"], "from 1 to 64"),
        (["--kills", "2"], "--kills has no effect without --kill-every"),
        (["--routers", "hash,hash"], "once each"),
        (["--moves-per-second", "-1"], "--moves-per-second must be"),
        (["--agents", "0"], "agents must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", *options, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_router_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cluster", "--routers", "owner,luck"])
    assert "--routers: must be owner, hash, or both" in capsys.readouterr().err


def test_a_model_that_is_not_there_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--model", "random:nothing", "--output", str(tmp_path)]) == 2
    assert "no shape 'nothing'" in capsys.readouterr().err
