"""The data types that peers are compared in."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.peers import launch
from benchmarks.peers.report import best_types, describe_run
from benchmarks.peers.rounds import Measurement, Round
from benchmarks.peers.workload import QUICK
from loadgen.peers import dtype_choice
from loadgen.peers.base import ServerSettings
from tests.loadgen.processes.calibrations import calibration

ROUND = Round(0, "djinn", "auto", None, Measurement([], [], 0.0, 0.0))


@pytest.mark.parametrize(("slow", "best"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_each_peer_runs_in_its_best_type_and_the_record_says_why(
    slow: str, best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype_choice, "on_cuda", lambda: False)
    monkeypatch.setattr(dtype_choice, "calibrate", lambda model, cores: calibration(slow))
    settings = ServerSettings(tmp_path, "auto", cores=(0, 1))
    launches = {f"{peer} auto": launch(peer, settings, 8123) for peer in ("djinn", "transformers")}

    assert launches["transformers auto"].command[-1] == best
    command = launches["djinn auto"].command
    assert command[command.index("--dtype") + 1] == "auto"
    run = describe_run(tmp_path, QUICK, launches, [ROUND])
    assert run.launches["transformers auto"].calibration == calibration(slow)
    ours, theirs = best_types(run)
    assert ours.startswith(f"`djinn auto` multiplies in {best}. A product of 1 row takes ")
    assert theirs.startswith(f"`transformers auto` multiplies in {best}. A product of 1 row takes ")
