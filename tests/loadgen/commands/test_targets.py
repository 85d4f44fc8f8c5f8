"""What the command line says about servers is checked before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.commands import targets
from tests.loadgen.peers.fakes import FakePeer


@pytest.mark.parametrize("experiment", ["kv", "oversubscribe", "resume-latency", "whitebox"])
def test_a_server_of_another_kind_is_refused_before_it_is_started(
    experiment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([experiment, "--target", "vllm", "--output", str(tmp_path)]) == 2
    assert "vllm cannot be measured here, only djinn, djinn+lru, djinn+none" in capsys.readouterr().err


def test_a_server_that_is_not_installed_is_told_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would else be found out when the targets before it have been measured, which can take an hour."""
    monkeypatch.setattr(targets, "find_peer", lambda name: FakePeer(name=name, installed=False))
    up = ["--target", "up=http://127.0.0.1:9"]
    assert main(["density", *up, "--target", "vllm", "--output", str(tmp_path)]) == 2
    assert "vllm is not installed: python -m loadgen peers install vllm" in capsys.readouterr().err
