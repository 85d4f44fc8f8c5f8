"""A small run on a real cluster of a tiny model, processes on one core, and what cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.experiments.cluster.report import ClusterReport
from tests.loadgen.experiments.running import raw_result, result

AGENTS, TURNS = 6, 6
LOAD = ["--agents", f"{AGENTS}", "--turns", f"{TURNS}", "--think", "1:3", "--rate", "6", "--context", "96"]
LENGTHS = ["--resume-tokens", "16", "--completion-tokens", "16", "--system-tokens", "32"]
DONE = ["--replicas", "2", "--routers", "owner,hash", "--moves-per-second", "4", "--kill-every", "3", "--kills", "1"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_cluster_whose_replica_is_killed_says_what_a_single_server_says(tmp_path: Path) -> None:
    """Two replicas, one of which is killed while sessions move; and the same agents behind a hash."""
    assert main(["cluster", *LOAD, *LENGTHS, *DONE, "--output", str(tmp_path)]) == 0
    assert result(tmp_path, ClusterReport).succeeded
    headings = ("By number of replicas", "What was done to replicas")
    owned, hashed = raw_result(tmp_path, ClusterReport, *headings)["sizes"]
    for size in (owned, hashed):
        assert size["findings"]["wrong"] == []
        assert size["findings"]["compared"] == size["summary"]["turns_completed"] == AGENTS * TURNS
        assert [fault["kind"] for fault in size["findings"]["faults"]] == ["kill"]
    findings = owned["findings"]
    assert (findings["lost"], findings["failures"], findings["owners"]) == ([], [], {"1": AGENTS})
    assert findings["moves"]
    assert all(move["bytes"] > 0 for move in findings["moves"])
    assert findings["routing"]["owner"] > 0
    assert (hashed["router"], hashed["findings"]["moves"]) == ("hash", [])
    assert hashed["findings"]["cold"] > 0 < hashed["summary"]["recomputed_tokens"]
