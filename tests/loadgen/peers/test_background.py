"""Servers of peers: up for a block or until they are told to stop, and then gone with all of their processes."""

import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from loadgen.cli import main
from loadgen.errors import LoadgenError
from loadgen.peers import serving
from loadgen.peers.base import Say, ServerSettings
from loadgen.peers.llamacpp import LlamaCppSource
from loadgen.peers.registry import PEERS, find_peer
from loadgen.processes.launch import Launch
from loadgen.processes.process import ServerFailedError

SERVER = """
import http.server, subprocess, sys
port = sys.argv[sys.argv.index("--port") + 1]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""
"""Lists its models, and has a child in a POSIX session of its own, as Ray's servers do."""
DIES = "import os, sys; sys.exit('no such model for ' + os.environ['MODEL'])"


@dataclass(frozen=True)
class FakePeer:
    """Runs `code`, a small real process."""

    code: str = SERVER
    name: str = "fake"
    served_model: str = "model"
    installed: bool = True

    def is_installed(self) -> bool:
        return self.installed

    def install(self, say: Say) -> None:
        raise NotImplementedError

    def launch(self, settings: ServerSettings, port: int) -> Launch:
        return Launch([sys.executable, "-c", self.code, "--port", str(port)], {"MODEL": str(settings.model)})

    def versions(self) -> dict[str, str]:
        return {"fake": "1"}


PEER = FakePeer()


def family(pid: int) -> list[psutil.Process]:
    """A server and its child."""
    server = psutil.Process(pid)
    [child] = server.children()
    return [server, child]


@pytest.fixture(autouse=True)
def stopped(cache: Path) -> Iterator[None]:
    """Nothing that a test started is left."""
    yield
    for peer in (PEER, find_peer("llamacpp")):
        if serving.running(peer) is not None:
            serving.stop(peer)


def test_what_cannot_start_says_why(settings: ServerSettings) -> None:
    with pytest.raises(LoadgenError, match="not installed: python -m loadgen peers install fake"):
        serving.start(FakePeer(installed=False), settings, None)
    with pytest.raises(LoadgenError, match="fake is not running"):
        serving.stop(PEER)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LoadgenError, match=f"port {port} is taken"):
            serving.start(PEER, settings, port)
    with pytest.raises(ServerFailedError, match=r"ended with status 1; the end of \S+fake.log:\nno such model"):
        serving.start(FakePeer(DIES), settings, None)
    assert serving.running(PEER) is None


# `python -m loadgen peers`.


def test_a_peer_from_start_to_stop(source: LlamaCppSource, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["peers", "start", "llamacpp", "--dtype", "float32", "--model"]
    assert main([*start, str(model)]) == 2
    assert "llamacpp is not installed: python -m loadgen peers install llamacpp" in capsys.readouterr().err
    source.server.parent.mkdir(parents=True)
    source.server.write_text(f"#!{sys.executable}\n{SERVER}")
    source.server.chmod(0o755)
    assert main([*start, str(model)]) == 0
    found = re.search(r"--target llamacpp=(http://127\.0\.0\.1:\d+)#model", capsys.readouterr().out)
    assert found is not None
    assert httpx.get(f"{found[1]}/v1/models").is_success
    note = serving.running(find_peer("llamacpp"))
    assert note is not None
    processes = family(note.pid)
    assert main([*start, str(model)]) == 2
    assert f"running already, as process {note.pid} on {found[1]}" in capsys.readouterr().err
    assert main(["peers", "list"]) == 0
    said = capsys.readouterr().out
    assert all(peer.name in said for peer in PEERS)
    assert main(["peers", "stop", "llamacpp"]) == 0
    assert "llamacpp has stopped" in capsys.readouterr().out
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert main(["peers", "stop", "llamacpp"]) == 2
