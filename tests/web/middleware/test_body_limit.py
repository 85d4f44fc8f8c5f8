from __future__ import annotations

import gzip
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.errors import assert_error
from tests.processes import serve_process
from tests.serving import serve

IMPORT = "/v1/sessions/import"
MIB = 1 << 20
LIMIT = 1000
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def limited() -> Iterator[httpx.Client]:
    with serve(max_request_bytes=LIMIT) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def body_of(size: int) -> bytes:
    return b'{"metadata": {}' + b" " * (size - 16) + b"}"


def in_pieces(body: bytes) -> Iterator[bytes]:
    """A body without a declared length: httpx sends it chunked."""
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


def test_a_body_of_exactly_the_limit_is_taken_and_a_larger_one_refused_however_it_comes(limited: httpx.Client) -> None:
    for body in (body_of, lambda size: in_pieces(body_of(size))):
        assert limited.post("/v1/sessions", content=body(LIMIT), headers=JSON).status_code == 201
        refused = limited.post("/v1/sessions", content=body(LIMIT + 1), headers=JSON)
        assert "1000 bytes" in assert_error(refused, 413, "request_too_large")


@pytest.mark.parametrize("path", ["/no-such-path", "/health"])
def test_a_declared_length_over_the_limit_is_refused_everywhere(limited: httpx.Client, path: str) -> None:
    response = limited.post(path, content=body_of(LIMIT + 1), headers=JSON)
    assert "1000 bytes" in assert_error(response, 413, "request_too_large")


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/import"])
def test_a_compressed_body_is_refused_by_name(http: httpx.Client, path: str) -> None:
    headers = {**JSON, "Content-Encoding": "gzip"}
    response = http.post(path, content=gzip.compress(b"{}"), headers=headers)
    assert "gzip" in assert_error(response, 415, "compressed_body", param="Content-Encoding")
    assert http.post("/v1/sessions", content=b"{}", headers={**JSON, "Content-Encoding": "identity"}).is_success


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("GET", "a GET request takes no body"),
        ("DELETE", "a DELETE request takes no body"),
        ("PUT", "1000 bytes"),
        ("PATCH", "1000 bytes"),
        ("OPTIONS", "1000 bytes"),
    ],
)
def test_only_a_post_has_the_limit_of_imports(limited: httpx.Client, method: str, says: str) -> None:
    response = limited.request(method, IMPORT, content=body_of(LIMIT + 1))
    assert says in assert_error(response, 413, "request_too_large")
    assert "1000 bytes" not in assert_error(limited.post(IMPORT, content=body_of(LIMIT + 1)), 422, "bad_export")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("path", [IMPORT, "/v1/sessions", "/v1/vectors", "/v1/vectors/one"])
def test_a_body_in_pieces_that_no_route_takes_is_refused_too(limited: httpx.Client, method: str, path: str) -> None:
    response = limited.request(method, path, content=in_pieces(body_of(LIMIT + 1)))
    if response.status_code == 405:  # known before the body comes
        assert_error(response, 405, "method_not_allowed")
    else:
        assert f"a {method} request takes no body" in assert_error(response, 413, "request_too_large")


def test_an_answer_to_head_has_the_status_alone(limited: httpx.Client) -> None:
    declared = limited.request("HEAD", IMPORT, content=body_of(LIMIT + 1))
    assert (declared.status_code, declared.content) == (413, b"")
    in_parts = limited.request("HEAD", IMPORT, content=in_pieces(body_of(LIMIT + 1)))
    assert (in_parts.status_code, in_parts.content) == (405, b"")


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE"])
def test_a_declared_length_is_refused_before_the_body_comes(http: httpx.Client, method: str) -> None:
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=10) as client:
        head = f"{method} {IMPORT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1500 * MIB}\r\n\r\nbegin"
        client.sendall(head.encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("method", "limit", "status"),
    [
        ("POST", "8MiB", 422),
        pytest.param("GET", "8MiB", 413, marks=pytest.mark.long),
        pytest.param("GET", "1GiB", 422, marks=pytest.mark.long),
    ],
)
def test_a_large_body_is_not_kept_in_memory(tmp_path: Path, method: str, limit: str, status: int) -> None:
    with (
        serve_process(tmp_path / "state", "--max-request-bytes", limit) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        http.get("/health").raise_for_status()
        process = psutil.Process(server.pid)
        resident = [process.memory_info().rss]

        def pieces() -> Iterator[bytes]:
            for _ in range(128):
                yield bytes(MIB)
                resident.append(process.memory_info().rss)

        assert http.request(method, IMPORT, content=pieces()).status_code == status
        assert max(resident) - resident[0] < 32 * MIB
