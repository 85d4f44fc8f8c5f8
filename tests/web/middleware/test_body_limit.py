"""Bodies of requests: how large one may be, and the budget that all share, which no client fills."""

import gzip
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from app.domain.errors import BodiesFull
from app.web.bodies import body_budget, client_of
from tests.errors import assert_error
from tests.processes import serve_process
from tests.serving import serve

IMPORT = "/v1/sessions/import"
MIB = 1 << 20
LIMIT = BUDGET = 1000
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def limited() -> Iterator[httpx.Client]:
    with serve(max_request_bytes=LIMIT) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def body_of(size: int) -> bytes:
    return b"{" + b" " * (size - 2) + b"}"


def in_pieces(body: bytes) -> Iterator[bytes]:
    """A body without a declared length: httpx sends it chunked."""
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


def test_a_body_of_exactly_the_limit_is_taken_and_a_larger_one_refused_however_it_comes(limited: httpx.Client) -> None:
    for body in (body_of, lambda size: in_pieces(body_of(size))):
        assert limited.post("/v1/sessions", content=body(LIMIT), headers=JSON).status_code == 201
        refused = limited.post("/v1/sessions", content=body(LIMIT + 1), headers=JSON)
        assert "1000 bytes" in assert_error(refused, 413, "request_too_large")
    nowhere = limited.post("/no-such-path", content=body_of(LIMIT + 1), headers=JSON)
    assert "1000 bytes" in assert_error(nowhere, 413, "request_too_large")


def test_a_compressed_body_is_what_it_holds_and_limited_as_that(limited: httpx.Client) -> None:
    compress: Any = {"gzip": gzip.compress, "ZSTD": zstandard.compress}
    for encoding, packed in compress.items():
        headers = {**JSON, "Content-Encoding": encoding}
        for body in (packed(body_of(LIMIT)), in_pieces(packed(b'{"metadata": {}}'))):
            assert limited.post("/v1/sessions", content=body, headers=headers).status_code == 201
        for size in (LIMIT + 1, 100_000):
            refused = limited.post("/v1/sessions", content=packed(body_of(size)), headers=headers)
            assert "1000 bytes" in assert_error(refused, 413, "request_too_large")
        for damaged in (b"{}", packed(body_of(LIMIT))[:-3]):
            refused = limited.post("/v1/sessions", content=damaged, headers=headers)
            assert_error(refused, 400, "malformed_request")


def test_a_body_in_another_encoding_is_refused_by_name(http: httpx.Client) -> None:
    for path, encoding in (("/v1/sessions", "br"), (IMPORT, "gzip")):
        response = http.post(path, content=gzip.compress(b"{}"), headers={**JSON, "Content-Encoding": encoding})
        assert encoding in assert_error(response, 415, "compressed_body", param="Content-Encoding")
        assert "gzip" in response.headers["accept-encoding"]
    assert http.post("/v1/sessions", content=b"{}", headers={**JSON, "Content-Encoding": "identity"}).is_success


def test_only_a_post_has_the_limit_of_imports_and_other_methods_take_no_body_or_a_small_one(
    limited: httpx.Client,
) -> None:
    too_large = body_of(LIMIT + 1)
    assert "1000 bytes" not in assert_error(limited.post(IMPORT, content=too_large), 422, "bad_export")
    assert "1000 bytes" in assert_error(limited.put(IMPORT, content=too_large), 413, "request_too_large")
    for method in ("GET", "DELETE"):
        for content in (too_large, in_pieces(too_large)):
            response = limited.request(method, "/v1/vectors/one", content=content)
            assert f"a {method} request takes no body" in assert_error(response, 413, "request_too_large")
    unknown = limited.request("DELETE", "/v1/sessions", content=in_pieces(too_large))
    assert_error(unknown, 405, "method_not_allowed")  # known before the body comes
    head = limited.request("HEAD", IMPORT, content=too_large)
    assert (head.status_code, head.content) == (413, b"")


@pytest.mark.parametrize(
    ("method", "limit", "status"), [("POST", "8MiB", 422), pytest.param("GET", "1GiB", 422, marks=pytest.mark.long)]
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


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, BUDGET), st.booleans())))
def test_no_client_takes_what_it_must_leave(asked: list[tuple[str, int, bool]]) -> None:
    budget, bodies = body_budget(BUDGET), list[tuple[str, int]]()
    for client, count, is_over in asked:
        if is_over and bodies:
            budget.give(*bodies.pop(0))
        own = sum(size for other, size in bodies if other == client)
        free = BUDGET - sum(size for _, size in bodies) - count
        fits = free >= (own + count if own else 0)
        try:
            budget.take(client, count)
        except BodiesFull:
            assert not fits
        else:
            assert fits
            bodies.append((client, count))
    for body in bodies:
        budget.give(*body)
    budget.take("a", BUDGET)


@pytest.mark.parametrize(
    ("scope", "client"),
    [
        ({"state": {"owner": "ours"}, "client": ("10.0.0.1", 1)}, "tenant ours"),
        ({"state": {"owner": None}, "client": ("10.0.0.1", 1)}, "10.0.0.1"),
        ({"client": ("2001:db8::1", 1)}, "2001:db8::/64"),
        ({"client": ("proxied", 1)}, "host proxied"),
        ({"client": None}, "host "),
    ],
)
def test_a_client_is_a_tenant_or_an_address(scope: dict[str, Any], client: str) -> None:
    assert client_of(scope) == client


@pytest.fixture(scope="module")
def small() -> Iterator[httpx.Client]:
    """A client with the first of two keys of a server with a small budget."""
    with (
        serve(max_bodies_bytes=BUDGET, api_keys=("ours", "theirs")) as url,
        httpx.Client(base_url=url, timeout=30, headers={"X-Api-Key": "ours"}) as client,
    ):
        yield client


@contextmanager
def refusing(http: httpx.Client, size: int, header: str, sent: bytes = b"{") -> Iterator[httpx.Response]:
    """The answer to a body of that size beside one of the same client that does not end. The server refuses that one
    instead while it counts one before.
    """
    head = f"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: ours\r\n{header}\r\n\r\n"
    for _ in range(20):
        with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=10) as client:
            client.sendall(head.encode() + sent)
            refused = answer_to(http, size, until=503)
            if refused.status_code == 503:
                yield refused
                return
    raise AssertionError("no body was refused")


def answer_to(http: httpx.Client, size: int, *, until: int, key: str = "ours") -> httpx.Response:
    """The answer to a body of that size, once it is of that status."""
    for _ in range(100):
        answer = http.post("/v1/sessions", content=body_of(size), headers={**JSON, "X-Api-Key": key})
        if answer.status_code == until:
            break
        time.sleep(0.02)
    return answer


def test_a_body_for_which_there_is_no_memory_is_refused_and_another_tenant_finds_room(small: httpx.Client) -> None:
    with refusing(small, 450, "Content-Length: 450") as refused:
        assert "this client" in assert_error(refused, 503, "bodies_full")
        assert refused.headers["Retry-After"] == "1"
        assert small.post("/v1/sessions", content=body_of(50), headers=JSON).status_code == 201
        assert small.get("/health").status_code == 200
        assert answer_to(small, 450, until=201, key="theirs").status_code == 201
    assert answer_to(small, 450, until=201).status_code == 201


def test_a_body_in_pieces_counts_as_it_comes(small: httpx.Client) -> None:
    refused = small.post("/v1/sessions", content=body_of(BUDGET + 1), headers=JSON)
    assert "1000 bytes" in assert_error(refused, 413, "request_too_large")
    assert answer_to(small, 400, until=201).status_code == 201, "what came before is gone"
    with refusing(small, 400, "Transfer-Encoding: chunked", b"190\r\n" + b" " * 400 + b"\r\n") as whole:
        assert_error(whole, 503, "bodies_full")
        pieces = in_pieces(body_of(400))
        assert_error(small.post("/v1/sessions", content=pieces, headers=JSON), 503, "bodies_full")
    assert answer_to(small, 400, until=201).status_code == 201
