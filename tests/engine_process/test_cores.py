"""Where the threads of an engine run that may use all cores."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from app.machine.cores import BOUND, CHOSEN, binding
from tests.engine_process.test_engine_process import engine_of, until, until_ready
from tests.processes import serve_process

CORES = os.sched_getaffinity(0)


def choose_nothing() -> None:
    for name in CHOSEN:
        os.environ.pop(name, None)


def masks(process: psutil.Process) -> Counter[frozenset[int]]:
    """How many of its threads may use which cores."""
    return Counter(frozenset(os.sched_getaffinity(thread.id)) for thread in process.threads())


@pytest.mark.long
@pytest.mark.skipif(len(CORES) < 2, reason="one core has nothing to choose")
def test_each_thread_that_computes_has_a_core_and_all_others_have_any(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state", own_engine=True, prepare=choose_nothing) as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            until_ready(http)
            session = http.post("/v1/sessions").json()["id"]
            turn = {"token_ids": [5, 6, 7] * 40, "max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}}
            http.post(f"/v1/sessions/{session}/generate", json=turn).raise_for_status()
        engine = engine_of(server)
        until(lambda: len([mask for mask in masks(engine) if len(mask) < len(CORES)]) > 1)
        found = masks(engine)
        assert all(number == 1 for mask, number in found.items() if len(mask) < len(CORES))
        assert os.sched_getaffinity(engine.pid) != CORES  # the thread that computes
        assert found[frozenset(CORES)] > 3
        assert set().union(*found) == CORES


@pytest.mark.parametrize("name", CHOSEN)
def test_who_has_chosen_where_threads_run_is_not_overruled(name: str) -> None:
    assert binding({name: "1"}) == {}
    assert binding({"PATH": "/bin"}) == BOUND
