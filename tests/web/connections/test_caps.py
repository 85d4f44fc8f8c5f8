"""Caps of connections: who is refused, and who gives way before that, or before the process has no descriptors."""

import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from app.domain.errors import FieldOutOfRange
from app.web.connections import GRACE_S, LOOPBACK, Caps, origin_of
from tests.processes import ServerProcess, serve_process
from tests.serving import tiny_settings
from tests.waiting import wait_until
from tests.web.connections.conftest import GET, HEADER, PATIENCE_S, Edge, Serve, read_answer, read_to_end

QUIET = b"GET /quiet HTTP/1.1\r\n" + HEADER + b"\r\n"


@pytest.mark.parametrize(
    ("peer", "origin"),
    [("::ffff:192.0.2.7", "192.0.2.7"), ("fe80::1%eth0", "fe80::/64"), ("127.9.9.9", LOOPBACK), ("::1", LOOPBACK)],
)
def test_a_host_counts_as_one_address(peer: str, origin: str) -> None:
    assert origin_of(peer) == origin


@pytest.mark.parametrize(
    ("descriptors", "changed", "caps"),
    [
        (1 << 20, {}, Caps(8192, 4096, 8192)),
        (1024, {}, Caps(768, 384, 768)),
        (1024, {"max_connections": 1}, Caps(1, 1, 1)),
        (1024, {"max_connections_per_address": 9}, Caps(768, 9, 9)),
    ],
)
def test_loopback_may_have_all_and_another_address_half(descriptors: int, changed: dict[str, int], caps: Caps) -> None:
    assert Caps.of(tiny_settings(**changed), descriptors) == caps
    with pytest.raises(FieldOutOfRange, match=r"max_connections must be at most 768: .* 1024"):
        Caps.of(tiny_settings(max_connections=769), 1024)


@pytest.mark.parametrize("cap", ["max_connections", "max_connections_per_address"])
def test_one_connection_too_many_gets_an_answer_if_all_have_a_request(edge: Serve, cap: str) -> None:
    server = edge(**{cap: 3})
    busy = [server.connect(QUIET) for _ in range(3)]
    assert all(server.quiet.acquire(timeout=PATIENCE_S) for _ in busy)
    _assert_refused(server)
    assert [read_answer(each).rpartition(b"\r\n\r\n")[2] for each in busy] == [b"late"] * 3
    time.sleep(2 * GRACE_S)
    assert read_answer(server.connect(GET)).startswith(b"HTTP/1.1 200 ")
    cause = "total" if cap == "max_connections" else "address"
    assert server.metric("djinn_connections_refused_total", cause=cause) == 1


def _assert_refused(server: Edge) -> None:
    """Without a request: the answer comes all the same."""
    header, _, body = read_to_end(server.connect()).partition(b"\r\n\r\n")
    assert header.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in header
    assert json.loads(body)["error"]["code"] == "connection_limit"


def test_the_one_that_waited_longest_for_a_request_gives_way(edge: Serve) -> None:
    server = edge(max_connections=3)
    half, idle = server.connect(GET[:-2]), server.connect(GET)
    read_answer(idle)
    busy = server.connect(QUIET)
    time.sleep(2 * GRACE_S)
    new = server.connect(GET)
    assert read_to_end(half) == b""
    assert read_answer(new).startswith(b"HTTP/1.1 200 ")
    newest = server.connect(GET)
    assert read_to_end(idle) == b""
    assert read_answer(newest).startswith(b"HTTP/1.1 200 ")
    assert read_answer(busy).endswith(b"late")


def test_an_answer_on_its_way_to_a_slow_reader_does_not_give_way(edge: Serve) -> None:
    server = edge(max_connections=1)
    slow = server.connect(b"GET /big HTTP/1.1\r\nConnection: close\r\n" + HEADER + b"\r\n", small_window=True)
    assert slow.recv(1).startswith(b"H")
    _assert_refused(server)
    assert len(read_to_end(slow)) > 4 << 20


def test_open_connections_are_counted_however_they_close(edge: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = edge()
    for sent in (b"", GET, GET[:-2], b"nonsense\r\n\r\n", QUIET):
        server.connect(sent).close()
    read_answer(server.connect(GET))
    wait_until(lambda: server.metric("djinn_connections") == 2)  # one of them asks
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client, client.responses.connect():
        assert server.metric("djinn_connections") == 3
    wait_until(lambda: server.metric("djinn_connections") == 2)
    for _ in range(20):
        assert read_to_end(server.connect(b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    assert sum("Invalid HTTP" in record.getMessage() for record in caplog.records) <= 1  # once a minute


# A server that is flooded.

MANY = 400


@contextmanager
def flood(server: ServerProcess, count: int = MANY) -> Iterator[None]:
    """So many connections with half a header, open at once."""
    url = httpx.URL(server.url)
    with ExitStack() as ends:
        for _ in range(count):
            connection = ends.enter_context(socket.create_connection((url.host, url.port or 0), PATIENCE_S))
            connection.sendall(GET[:-2])
        yield


def assert_quiet(server: ServerProcess) -> None:
    log = server.output.read_text()
    assert "Traceback" not in log
    assert len(log.splitlines()) < 20, log


def test_half_open_connections_do_not_keep_others_out(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state", descriptors=(256, 256)) as server, flood(server):
        # Those that have just come have a moment to speak: until it is over the server says to come again.
        wait_until(lambda: httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200)
        time.sleep(2 * GRACE_S)
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
