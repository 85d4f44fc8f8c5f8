"""The budget of request bodies: no client fills it, and what is given back is free again."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.errors import BodiesFull
from app.web.connections.body_budget import BodyBudget, client_of
from tests.errors import assert_error
from tests.serving import serve

BUDGET = 1000
JSON = {"Content-Type": "application/json"}
CLIENTS = st.sampled_from("abc")


@given(st.lists(st.tuples(CLIENTS, st.integers(1, BUDGET), st.booleans())))
def test_no_client_takes_what_it_must_leave(asked: list[tuple[str, int, bool]]) -> None:
    budget, bodies = BodyBudget(BUDGET), list[tuple[str, int]]()
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


def test_a_body_that_grows_is_one_body() -> None:
    budget, sizes = BodyBudget(BUDGET), Counter[str]()
    for _ in range(10):
        budget.take("a", 100, sizes["a"])
        sizes["a"] += 100
    with pytest.raises(BodiesFull, match="under way take"):
        budget.take("b", 1)


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
    with serve(max_bodies_bytes=BUDGET) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


@contextmanager
def sending(http: httpx.Client, headers: str, sent: bytes = b"{") -> Iterator[None]:
    """A request whose body does not end."""
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=10) as client:
        client.sendall(f"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n".encode() + sent)
        yield


def body_of(size: int) -> bytes:
    return b"{" + b" " * (size - 2) + b"}"


def answer_to(http: httpx.Client, size: int, *, until: int, **headers: str) -> httpx.Response:
    """The answer to a body of that size, once it is of that status."""
    for _ in range(200):
        answer = http.post("/v1/sessions", content=body_of(size), headers={**JSON, **headers})
        if answer.status_code == until:
            break
        time.sleep(0.02)
    return answer


def test_a_body_for_which_there_is_no_memory_is_refused(small: httpx.Client) -> None:
    with sending(small, "Content-Length: 400"):
        refused = answer_to(small, 400, until=503)
        assert "this client" in assert_error(refused, 503, "bodies_full")
        assert refused.headers["Retry-After"] == "1"
        assert small.post("/v1/sessions", content=body_of(100), headers=JSON).status_code == 201
        assert small.get("/health").status_code == 200
    assert answer_to(small, 400, until=201).status_code == 201


def test_a_body_in_pieces_counts_as_it_comes(small: httpx.Client) -> None:
    refused = small.post("/v1/sessions", content=body_of(BUDGET + 1), headers=JSON)
    assert "1000 bytes" in assert_error(refused, 413, "request_too_large")
    part = b" " * 400
    with sending(small, "Transfer-Encoding: chunked", b"190\r\n" + part + b"\r\n"):
        assert_error(answer_to(small, 400, until=503), 503, "bodies_full")

        def pieces() -> Iterator[bytes]:
            for _ in range(4):
                yield b" " * 100

        assert_error(small.post("/v1/sessions", content=pieces(), headers=JSON), 503, "bodies_full")
    assert answer_to(small, 400, until=201).status_code == 201


def test_another_tenant_finds_room() -> None:
    with (
        serve(max_bodies_bytes=BUDGET, api_keys=("ours", "theirs")) as url,
        httpx.Client(base_url=url, timeout=30) as http,
        sending(http, "Content-Length: 450\r\nAuthorization: Bearer ours"),
    ):
        refused = answer_to(http, 450, until=503, Authorization="Bearer ours")
        assert "this client" in assert_error(refused, 503, "bodies_full")
        assert answer_to(http, 450, until=201, Authorization="Bearer theirs").status_code == 201
