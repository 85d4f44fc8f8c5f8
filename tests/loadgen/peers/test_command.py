"""`python -m loadgen peers`."""

from __future__ import annotations

import re

import httpx
import pytest

from loadgen.cli import main
from loadgen.commands import peers
from loadgen.peers import base
from tests.loadgen.peers.fakes import DIES, FakePeer


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a name that the command line knows, no other process has to be installed."""
    monkeypatch.setattr(peers, "find_peer", lambda name: FakePeer(name=name))


@pytest.fixture
def model(settings: base.ServerSettings) -> str:
    settings.model.mkdir(parents=True)
    (settings.model / "config.json").write_text("{}")
    return str(settings.model)


def test_a_peer_from_start_to_stop(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "start", "vllm", "--model", model]) == 0
    said = capsys.readouterr().out
    found = re.search(r"--target vllm=(http://127\.0\.0\.1:\d+)#model", said)
    assert found is not None
    assert httpx.get(f"{found[1]}/v1/models").is_success

    assert main(["peers", "stop", "vllm"]) == 0
    assert "vllm has stopped" in capsys.readouterr().out
    with pytest.raises(httpx.ConnectError):
        httpx.get(found[1])
    assert main(["peers", "stop", "vllm"]) == 2
    assert "vllm is not running" in capsys.readouterr().err


def test_what_cannot_start_says_why(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peers", "start", "vllm", "--model", "/nowhere"]) == 2
    assert "no model in /nowhere" in capsys.readouterr().err
    monkeypatch.setattr(peers, "find_peer", lambda name: FakePeer(DIES, name=name))
    assert main(["peers", "start", "vllm", "--model", model]) == 2
    assert "no such model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["start"],
        ["start", "vllm", "--kv", "20"],
        ["start", "vllm", "--kv", "0x1024"],
        ["start", "vllm", "--port", "65536"],
        ["start", "vllm", "--dtype", "int8"],
        ["stop", "--port", "1"],
    ],
)
def test_a_command_line_that_cannot_be_read(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["peers", *arguments])
    assert ended.value.code == 2


def test_the_list_has_every_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in peers.NAMES)
