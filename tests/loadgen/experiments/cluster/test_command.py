"""A small run on a real cluster of a tiny model, processes on one core, and what cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from loadgen.cli import main
from loadgen.experiments.cluster.pinning import pin
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


CHILD = """
import subprocess, sys, threading, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(threading.active_count(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins nothing")
def test_all_threads_of_a_process_and_of_its_children_are_pinned() -> None:
    core = max(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as child:
        family = [psutil.Process(child.pid)]
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"2\n"
            family += family[0].children()
            pin(family[0], core)
            threads = [thread.id for process in family for thread in process.threads()]
            assert len(threads) >= 3
            assert {tuple(os.sched_getaffinity(thread)) for thread in threads} == {(core,)}
        finally:
            for process in family:
                process.kill()
