"""A run that is broken off keeps what it has measured."""

from __future__ import annotations

import io
from typing import cast

import httpx
import pytest
from rich.console import Console

from benchmarks.peers.__main__ import run_rounds
from benchmarks.peers.rounds import Measurement, Round
from benchmarks.peers.runner import PeerRunner
from benchmarks.peers.workload import Workload

VARIANTS = [("djinn", "auto"), ("vllm", "auto")]


class FailingRunner:
    """Stands for servers that take minutes; one of them fails after so many runs."""

    def __init__(self, runs: int, error: BaseException) -> None:
        self.runs, self.error = runs, error

    def run(self, number: int, peer: str, dtype: str, workload: Workload) -> Round:
        self.runs -= 1
        if self.runs < 0:
            raise self.error
        return Round(number, peer, dtype, None, Measurement([], [], 0.0, 0.0))


def run(runs: int, error: BaseException) -> tuple[list[Round], str]:
    said = io.StringIO()
    runner = cast("PeerRunner", FailingRunner(runs, error))
    rounds = run_rounds(runner, VARIANTS, 3, cast("Workload", None), Console(file=said, width=200))
    return rounds, said.getvalue()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), httpx.RemoteProtocolError("gone")])
def test_whole_rounds_are_kept(error: BaseException) -> None:
    rounds, said = run(5, error)
    assert [(each.number, each.peer) for each in rounds] == [(0, "djinn"), (0, "vllm"), (1, "vllm"), (1, "djinn")]
    assert "broken off after 2 of 3 rounds" in said


def test_without_a_whole_round_there_is_nothing_to_keep() -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        run(1, httpx.RemoteProtocolError("gone"))


def test_a_bug_is_no_end_of_a_run() -> None:
    with pytest.raises(ZeroDivisionError):
        run(5, ZeroDivisionError())
