"""What the command line says about servers is checked before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.options import targets
from tests.loadgen.peers.fakes import FakePeer


@pytest.mark.parametrize("experiment", ["kv", "oversubscribe", "resume-latency", "whitebox"])
def test_a_server_of_another_kind_is_refused_before_it_is_started(
    experiment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([experiment, "--target", "vllm", "--output", str(tmp_path)]) == 2
    assert "this experiment cannot measure vllm, only djinn, djinn+lru, djinn+none" in capsys.readouterr().err


def test_a_server_that_is_not_installed_is_told_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would else be found out when the targets before it have been measured, which can take an hour."""
    monkeypatch.setattr(targets, "find_peer", lambda name: FakePeer(name=name, installed=False))
    up = ["--target", "up=http://127.0.0.1:9"]
    assert main(["density", *up, "--target", "vllm", "--output", str(tmp_path)]) == 2
    assert "vllm is not installed: python -m loadgen peers install vllm" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--model=m", "--dtype=float32", "--kv=2x64"])
def test_options_of_servers_to_start_are_refused_where_all_are_up(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv", "--target", "up=http://127.0.0.1:9", option, "--output", str(tmp_path)]) == 2
    message = f"{option.partition('=')[0]} is for servers that are started for the run, and all targets are up already"
    assert message in capsys.readouterr().err


def test_resume_latency_reads_the_model_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--target", "up=http://127.0.0.1:9", "--model", str(tmp_path), "--output", str(tmp_path)]
    assert main(["resume-latency", *arguments]) == 2
    assert f"no model in {tmp_path}" in capsys.readouterr().err
    assert main(["resume-latency", *arguments, "--kv", "2x64"]) == 2
    assert "--kv is for servers that are started" in capsys.readouterr().err
