from __future__ import annotations

import re
import time
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI

from app.domain.errors import Busy, DjinnError, Draining, EngineError, FieldOutOfRange, WrongState
from app.web.errors.bodies import MESSAGES_PATHS, error_answer
from app.web.errors.handlers import install_error_handlers
from app.web.request_id import RequestIdMiddleware
from tests.errors import assert_error

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("path", ["/no-such-path", "/v1/sessions/", "/health/", "/v1/completions/"])
def test_an_unknown_path_has_the_error_body_and_points_to_the_list_of_routes(http: httpx.Client, path: str) -> None:
    assert "GET /docs shows all routes" in assert_error(http.get(path), 404, "not_found")


def test_a_wrong_method_names_all_that_the_path_has(http: httpx.Client) -> None:
    assert http.put("/v1/sessions", json={}).headers["allow"] == "GET, POST"
    for path, methods in http.get("/openapi.json").json()["paths"].items():
        response = http.request("TRACE", re.sub(r"\{\w+\}", "x", path))
        if path in MESSAGES_PATHS:
            assert (response.status_code, response.json()["type"]) == (405, "error")
        else:
            assert_error(response, 405, "method_not_allowed")
        assert {*methods} <= {*response.headers["allow"].lower().split(", ")}  # `import` is also the name of a session


@pytest.mark.parametrize("body", [b"", b"nul", b'{"ttl_s": 1e999999}x', b"[]", b'"text"', b"7"])
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
    ("body", "param"),
    [
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "a", "stop": "\\ud800"}', "stop"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages.0.content"),
        (b'{"prompt": "a", "\\ud800": 1}', None),
    ],
)
def test_half_a_surrogate_pair_is_refused_where_it_was_sent(http: httpx.Client, body: bytes, param: str | None) -> None:
    session = http.post("/v1/sessions").json()["id"]
    response = http.post(f"/v1/sessions/{session}/generate", content=body, headers=JSON)
    assert "nicode" in assert_error(response, 422, "field_out_of_range", param=param)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"ttl_s": "\xff"}', "invalid UTF-8 in the body: byte 11 is 0xff"),
        (b"[" * 100_000, "at most 100 levels"),
        ("{}".encode("utf-16"), "invalid UTF-8 in the body: byte 0 is 0xff"),
        (b'{"ttl_s": ' + b"9" * 5000 + b"}", "at most 4300 digits"),
        (b'{"ttl_s": 5', "invalid JSON in the body: it ends too early, at line 1, column 12"),
        (b'{"ttl_s": 5}\n]', "invalid JSON in the body: unexpected ']' at line 2, column 1"),
        (b'{"metadata": {"a": "1", "b": "2", "a": "3"}}', "an object in the body gives a more than once"),
        (b'{"metadata": {' + b'"":"",' * 10_000 + b'"":""}}', "an object in the body has 10001 names: at most 10000"),
        (b'{"ttl_s": [' + b"[]," * 200_000 + b"[]]}", "the body has too many values: at most 262144"),
    ],
    ids=["not UTF-8", "deep", "UTF-16", "long number", "cut", "too much", "twice", "many names", "many values"],
)
def test_a_body_that_cannot_be_parsed_says_why(http: httpx.Client, body: bytes, reason: str) -> None:
    message = assert_error(http.post("/v1/sessions", content=body, headers=JSON), 400, "malformed_request")
    assert reason in message


def test_a_hostile_body_is_refused_at_once(http: httpx.Client) -> None:
    """A string without an end, full of quotes that could each begin another one."""
    body = b'"' + b'\\"' * 1_000_000 + b"[" * 101
    began = time.perf_counter()
    assert_error(http.post("/v1/sessions", content=body, headers=JSON, timeout=5), 400, "malformed_request")
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("word", ["x" * 30_000, "x%20" * 7_500])
def test_what_a_client_sent_comes_back_cut(http: httpx.Client, word: str) -> None:
    assert len(http.get(f"/v1/{word}").content) < 2_000
    assert len(http.get(f"/v1/sessions/{word}").content) < 2_000
    for body in ({word: 1}, {"ttl_s": 1, "metadata": {word: 1}}, {"residency": word}):
        response = http.post("/v1/sessions", json=body)
        assert response.status_code == 422
        assert len(response.content) < 3_000


async def answer_to_a_failure(error: Exception) -> httpx.Response:
    app = FastAPI()
    app.add_middleware(RequestIdMiddleware)
    install_error_handlers(app)

    @app.get("/failing")
    async def fail() -> None:
        raise error

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get("/failing")


async def test_a_bug_is_a_500_without_its_secrets() -> None:
    response = await answer_to_a_failure(RuntimeError("the password is swordfish"))
    assert "swordfish" not in assert_error(response, 500, "internal_error")


async def test_a_busy_server_says_when_to_come_back() -> None:
    response = await answer_to_a_failure(Busy("come back", retry_after_s=7))
    assert_error(response, 429, "queue_full")
    assert response.headers["retry-after"] == "7"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Draining("x"), 529, "overloaded_error"),
        (EngineError("x"), 500, "api_error"),
        (WrongState("x"), 409, "invalid_request_error"),
        (FieldOutOfRange("x", param="y"), 422, "invalid_request_error"),
    ],
)
def test_the_messages_routes_have_anthropics_form_of_an_error(error: DjinnError, status: int, kind: str) -> None:
    scope: Any = {"path": "/v1/messages", "state": {"request_id": "req_1"}}
    found, body = error_answer(error, scope)
    assert found == status
    assert orjson.loads(body) == {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": "req_1"}


def test_all_others_have_openais() -> None:
    status, body = error_answer(Draining("x"), {"path": "/v1/chat/completions"})
    assert status == 503
    assert orjson.loads(body) == {"error": {"message": "x", "type": "server_error", "code": "draining", "param": None}}
