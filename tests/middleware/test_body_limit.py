from __future__ import annotations

import gzip
from collections.abc import Iterator

import httpx
import pytest

from tests.conftest import ServeWith
from tests.errors import assert_error

LIMIT = 1000
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def limited(serve_with: ServeWith) -> httpx.Client:
    return serve_with(max_request_bytes=LIMIT)


def body_of(size: int) -> bytes:
    return b'{"metadata": {}' + b" " * (size - 16) + b"}"


def in_pieces(body: bytes) -> Iterator[bytes]:
    """A body without a declared length: httpx sends it chunked."""
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


def test_a_body_of_exactly_the_limit_is_taken(limited: httpx.Client) -> None:
    assert limited.post("/v1/sessions", content=body_of(LIMIT), headers=JSON).status_code == 201
    assert limited.post("/v1/sessions", content=in_pieces(body_of(LIMIT)), headers=JSON).status_code == 201


@pytest.mark.parametrize("path", ["/v1/sessions", "/no-such-path", "/health"])
def test_a_declared_length_over_the_limit_is_refused_everywhere(limited: httpx.Client, path: str) -> None:
    response = limited.post(path, content=body_of(LIMIT + 1), headers=JSON)
    assert "1000 bytes" in assert_error(response, 413, "request_too_large")


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/import"])
def test_a_compressed_body_is_refused_by_name(http: httpx.Client, path: str) -> None:
    headers = {**JSON, "Content-Encoding": "gzip"}
    response = http.post(path, content=gzip.compress(b"{}"), headers=headers)
    assert "gzip" in assert_error(response, 415, "compressed_body", param="Content-Encoding")
    assert http.post("/v1/sessions", content=b"{}", headers={**JSON, "Content-Encoding": "identity"}).is_success


def test_a_body_in_pieces_is_refused_when_it_passes_the_limit(limited: httpx.Client) -> None:
    response = limited.post("/v1/sessions", content=in_pieces(body_of(LIMIT + 1)), headers=JSON)
    assert "1000 bytes" in assert_error(response, 413, "request_too_large")
