"""More connections than the process may have descriptors, each with half a request."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.processes import ServerProcess, serve_process
from tests.tenants.tenant_files import wait_for
from tests.web.connections.conftest import PATIENCE_S, wait_until

HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
MANY = 400


@contextmanager
def flood(server: ServerProcess, count: int = MANY) -> Iterator[list[socket.socket]]:
    """So many connections with half a header, open at once."""
    url = httpx.URL(server.url)
    assert url.port is not None
    with ExitStack() as ends:
        connections = []
        for _ in range(count):
            connection = ends.enter_context(socket.create_connection((url.host, url.port), PATIENCE_S))
            connection.sendall(HALF)
            connections.append(connection)
        yield connections


def assert_quiet(server: ServerProcess) -> None:
    log = server.output.read_text()
    assert "Traceback" not in log
    assert len(log.splitlines()) < 20, log


def test_half_open_connections_do_not_keep_others_out(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state", descriptors=(256, 256)) as server, flood(server):
        # Those that have just come have a moment to speak: until it is over the server says to come again.
        wait_for(lambda: httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200)
        for _ in range(10):
            assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
        assert_quiet(server)


@pytest.mark.long
def test_the_soft_limit_of_descriptors_is_raised(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state", descriptors=(256, 1024)) as server, flood(server):
        metrics = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
        assert f"djinn_connections {MANY + 1}.0" in metrics.splitlines()
        assert 'djinn_connections_ended_total{cause="gave_way"} 0.0' in metrics.splitlines()


@pytest.mark.long
def test_a_server_out_of_descriptors_takes_connections_once_it_has_some(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state") as server:
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        used = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + 10, before[1]))
        with flood(server, 50):
            wait_until(lambda: "cannot be taken" in server.output.read_text())
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
            assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
        log = server.output.read_text()
        assert log.count("cannot be taken") == 1
        assert_quiet(server)
