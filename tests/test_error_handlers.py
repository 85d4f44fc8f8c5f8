from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from app.error_handlers import install_error_handlers
from app.errors import Busy, DjinnError
from app.middleware.request_id import RequestIdMiddleware
from tests.errors import assert_error

JSON = {"Content-Type": "application/json"}


def test_an_unknown_path_and_a_wrong_method_have_the_error_body(http: httpx.Client) -> None:
    assert_error(http.get("/no-such-path"), 404, "not_found")
    response = http.put("/v1/sessions", json={})
    assert_error(response, 405, "method_not_allowed")
    assert "POST" in response.headers["allow"]


@pytest.mark.parametrize(
    "body", [b"{", b"", b"nul", b'{"ttl_s": 1e999999}x', b"[" * 100_000, b'"\xff"', b"[]", b'"text"', b"7"]
)
def test_a_body_that_is_no_json_object_is_malformed(http: httpx.Client, body: bytes) -> None:
    session = http.post("/v1/sessions").json()["id"]
    response = http.post(f"/v1/sessions/{session}/rewind", content=body, headers=JSON)
    assert_error(response, 400, "malformed_request")


def test_json_without_its_content_type_says_what_is_missing(http: httpx.Client) -> None:
    response = http.post("/v1/sessions", content=b'{"ttl_s": 5}')
    assert "application/json" in assert_error(response, 400, "malformed_request")


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e400"])
def test_numbers_that_are_none_are_refused(http: httpx.Client, value: bytes) -> None:
    session = http.post("/v1/sessions").json()["id"]
    body = b'{"prompt": "a", "temperature": ' + value + b"}"
    response = http.post(f"/v1/sessions/{session}/generate", content=body, headers=JSON)
    assert_error(response, 422, "field_out_of_range", param="temperature")


@pytest.mark.parametrize(
    "body", [b'{"prompt": "\\ud800"}', b'{"prompt": "a", "\\ud800": 1}', b'{"prompt": "a", "stop": "\\ud800"}']
)
def test_half_a_surrogate_pair_is_the_clients_error(http: httpx.Client, body: bytes) -> None:
    session = http.post("/v1/sessions").json()["id"]
    response = http.post(f"/v1/sessions/{session}/generate", content=body, headers=JSON)
    assert response.status_code in (400, 422)
    assert response.json()["error"]["message"]


async def test_a_bug_is_a_500_without_its_secrets() -> None:
    app = FastAPI()
    app.add_middleware(RequestIdMiddleware)
    install_error_handlers(app)

    @app.get("/bug")
    async def bug() -> None:
        raise RuntimeError("the password is swordfish")

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        message = assert_error(await client.get("/bug"), 500, "internal_error")
    assert "swordfish" not in message


async def test_a_busy_server_says_when_to_come_back() -> None:
    app = FastAPI()
    app.add_middleware(RequestIdMiddleware)
    install_error_handlers(app)

    @app.get("/busy")
    async def busy() -> None:
        raise Busy("come back", retry_after_s=7)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.get("/busy")
    assert_error(response, 429, "queue_full")
    assert response.headers["retry-after"] == "7"


def all_errors(error: type[DjinnError]) -> list[type[DjinnError]]:
    return [error, *(each for sub in error.__subclasses__() for each in all_errors(sub))]


def test_every_error_has_an_http_status_and_a_code() -> None:
    for error in all_errors(DjinnError):
        assert 400 <= error.status < 600
        assert error.code
        assert error.type
