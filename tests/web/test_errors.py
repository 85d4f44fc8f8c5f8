"""Refusals: one shape for each dialect, in the server's own words, with the field, what it takes and what it got."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

import app.main
from app.domain.errors import Busy, Draining, FieldOutOfRange
from app.web.errors import MESSAGES, described, error_answer, install_error_handlers
from app.web.middleware import RequestMiddleware
from app.wire.base import WireModel
from tests.errors import assert_error, assert_messages_error

assert app.main.ROUTERS  # every request model is loaded
JSON = {"Content-Type": "application/json"}
FOREIGN = re.compile(
    r"should|Input|validation|valid (string|integer|number|list|dict|bool)|"
    r"greater than|less than|value_error|ermitted|nable to|None|True"
)
"""Words of pydantic and of Python."""
VALUES: list[object] = [
    *(None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "", "x", "y" * 2000, "\ud800"),
    *([], [-1, "x", None], [["x"]] * 2000, [{}], {}, {"": 0, "1": "x", "9999999999": 1, "layer": -1}),
    [{"role": "user", "content": [{"type": "image"}]}, {"role": "tool"}, {"role": "x"}, {"role": "assistant"}],
    [{"op": "add", "vector": [float("nan")], "positions": [3, 2], "max_norm": 0}, {"op": "clamp", "vector": "?"}],
]


@pytest.fixture
def turns(http: httpx.Client) -> str:
    """The path of turns of a new session."""
    return f"/v1/sessions/{http.post('/v1/sessions').json()['id']}/generate"


@pytest.mark.parametrize("path", ["/no-such-path", "/v1/sessions/"])
def test_an_unknown_path_has_the_error_body_and_points_to_the_list_of_routes(http: httpx.Client, path: str) -> None:
    assert "GET /docs shows all routes" in assert_error(http.get(path), 404, "not_found")


def test_a_wrong_method_names_all_that_the_path_has(http: httpx.Client) -> None:
    assert http.put("/v1/sessions", json={}).headers["allow"] == "GET, HEAD, POST"
    for path, methods in http.get("/openapi.json").json()["paths"].items():
        response = http.request("TRACE", re.sub(r"\{\w+\}", "x", path))
        if path.startswith(MESSAGES):
            assert_messages_error(response, 405)
        else:
            assert_error(response, 405, "method_not_allowed")
        assert {*methods} <= {*response.headers["allow"].lower().split(", ")}  # `import` is also the name of a session


def test_a_body_that_is_no_json_object_or_does_not_say_that_it_is_one_is_malformed(
    http: httpx.Client, turns: str
) -> None:
    for body in (b"", b"nul", b"[]", b"7"):
        assert_error(http.post(turns, content=body, headers=JSON), 400, "malformed_request")
    response = http.post("/v1/sessions", content=b'{"ttl_s": 5}')
    assert "application/json" in assert_error(response, 400, "malformed_request")


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b'{"prompt": "a", "temperature": NaN}', "temperature", ""),
        (b'{"prompt": "a", "temperature": 1e400}', "temperature", ""),
        (b'{"prompt": "\\ud800"}', "prompt", "nicode"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages.0.content", "nicode"),
        (b'{"prompt": "a", "\\ud800": 1}', None, "nicode"),
    ],
)
def test_what_json_can_say_and_no_field_takes_is_refused_where_it_was_sent(
    http: httpx.Client, turns: str, body: bytes, param: str | None, says: str
) -> None:
    response = http.post(turns, content=body, headers=JSON)
    assert says in assert_error(response, 422, "field_out_of_range", param=param)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"ttl_s": "\xff"}', "invalid UTF-8 in the body: byte 11 is 0xff"),
        pytest.param(b"[" * 100_000, "at most 100 levels", id="deep"),
        pytest.param(b'{"ttl_s": ' + b"9" * 5000 + b"}", "at most 4300 digits", id="long"),
        (b'{"ttl_s": 5', "invalid JSON in the body: it ends too early, at line 1, column 12"),
        (b'{"ttl_s": 5}\n]', "invalid JSON in the body: unexpected ']' at line 2, column 1"),
        (b'{"metadata": {"a": "1", "b": "2", "a": "3"}}', "an object in the body gives a more than once"),
        pytest.param(
            b'{"metadata": {' + b'"":"",' * 10_000 + b'"":""}}',
            "an object in the body has 10001 names: at most 10000",
            id="names",
        ),
        pytest.param(
            b'{"ttl_s": [' + b"[]," * 200_000 + b"[]]}", "the body has too many values: at most 262144", id="values"
        ),
    ],
)
def test_a_body_that_cannot_be_parsed_says_why(http: httpx.Client, body: bytes, reason: str) -> None:
    message = assert_error(http.post("/v1/sessions", content=body, headers=JSON), 400, "malformed_request")
    assert reason in message


def test_a_byte_order_mark_is_not_read(http: httpx.Client) -> None:
    answer = http.post("/v1/sessions", content=b'\xef\xbb\xbf{"metadata": {"a": "b"}}', headers=JSON)
    assert answer.json()["metadata"] == {"a": "b"}


def test_a_hostile_body_is_refused_at_once(http: httpx.Client) -> None:
    """A string without an end, full of quotes that could each begin another one."""
    body = b'"' + b'\\"' * 1_000_000 + b"[" * 101
    assert_error(http.post("/v1/sessions", content=body, headers=JSON, timeout=5), 400, "malformed_request")


@pytest.mark.parametrize("word", ["x" * 30_000, "x%20" * 7_500, "%E2%80%AE%1B"])
def test_what_a_client_sent_comes_back_cut_and_turns_no_text(http: httpx.Client, word: str) -> None:
    answers = http.get(f"/v1/{word}"), http.get(f"/v1/sessions/{word}")
    assert all(len(each.content) < 2_000 and "\u202e" not in each.text for each in answers)
    for body in ({word: 1}, {"ttl_s": 1, "metadata": {word: 1}}, {"residency": word}):
        response = http.post("/v1/sessions", json=body)
        assert response.status_code == 422
        assert len(response.content) < 3_000


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (RuntimeError("the password is swordfish"), 500, "internal_error", None),
        (Busy("come back", retry_after_s=7), 429, "queue_full", "7"),
    ],
)
async def test_a_bug_keeps_its_secrets_and_a_busy_server_says_when_to_come_back(
    error: Exception, status: int, code: str, retry_after: str | None
) -> None:
    failing = FastAPI()
    failing.add_middleware(RequestMiddleware)
    install_error_handlers(failing)

    @failing.get("/failing")
    async def fail() -> None:
        raise error

    transport = httpx.ASGITransport(failing, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/failing")
    assert "swordfish" not in assert_error(response, status, code)
    assert response.headers.get("retry-after") == retry_after


def test_a_server_that_drains_is_overloaded_in_anthropics_words_and_unavailable_in_openais() -> None:
    scope: Any = {"path": "/v1/messages", "state": {"request_id": "req_1"}}
    status, body = error_answer(Draining("x"), scope)
    told = {"type": "overloaded_error", "message": "x"}
    assert (status, orjson.loads(body)) == (529, {"type": "error", "error": told, "request_id": "req_1"})
    status, body = error_answer(Draining("x"), {"path": "/v1/chat/completions"})
    refusal = {"message": "x", "type": "server_error", "code": "draining", "param": None}
    assert (status, orjson.loads(body)) == (503, {"error": refusal})


def request_models(base: type[WireModel] = WireModel) -> Iterator[type[WireModel]]:
    for model in base.__subclasses__():
        yield model
        yield from request_models(model)


def test_no_word_of_the_validator_comes_through() -> None:
    seen = set()
    for model in set(request_models()):
        bodies = [{name: value} for name in (*model.model_fields, "no such field") for value in VALUES]
        for body in [*bodies, *VALUES]:
            try:
                model.model_validate(body)
            except ValidationError as refused:
                for problem, (_, words) in zip(refused.errors(), described(model, refused), strict=True):
                    assert not FOREIGN.search(words), words
                    assert words
                    seen.add(problem["type"])
            except FieldOutOfRange:
                pass
    assert {"missing", "extra_forbidden", "int_type", "float_type", "string_type", "bool_type", "list_type"} <= seen
    assert {"dict_type", "literal_error", "enum", "role", "prompt", "value_error"} <= seen
    assert {"too_short", "too_long", "string_too_short", "string_too_long", "string_pattern_mismatch"} <= seen
    assert {"less_than_equal", "greater_than_equal", "greater_than", "finite_number", "string_unicode"} <= seen


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": 5}, "prompt", "prompt: a string; got 5"),
        ({"stop": ["a"] * 17}, "stop", "or a list of at most 16 strings; got a list of 17"),
        ({"stop": [""]}, "stop.0", "stop.0: a string of 1 to 1000 characters; got ''"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "logit_bias.1: a number from -100 to 100; got 101"),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias.9999999999", "at most 2147483647; got 9999999999"),
        ({"max_tokens": 10**4000}, "max_tokens", "max_tokens: an integer from 0 to 2147483647; got 1000"),
        ({"no such field": 1}, "no such field", "no such field: unknown field"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "messages.0.content: required"),
        ({"limit": "9" * 5000}, "limit", "limit: an integer from 1 to 100; got a string of 5000 characters"),
        ({"state": "closed"}, "state", "state: 'idle', 'queued', 'running' or 'paused'; got 'closed'"),
    ],
)
def test_a_refusal_names_field_range_and_value(
    http: httpx.Client, turns: str, body: dict[str, Any], param: str, says: str
) -> None:
    """Of a turn, or of a query."""
    is_query = param in ("limit", "state")
    response = http.get("/v1/sessions", params=body) if is_query else http.post(turns, json={"prompt": "a", **body})
    assert says in assert_error(response, 422, "field_out_of_range", param=param)


def test_a_missing_field_that_belongs_elsewhere_is_told_where(http: httpx.Client) -> None:
    refused = http.post("/v1/vectors", json={"name": "x"})
    assert "name: required in the query string" in assert_error(refused, 422, "field_out_of_range", param="name")


WRONG = [None] * 50_000
LONG = {"role": "user", "content": WRONG}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [1, *WRONG]}),
        ("/v1/completions", {"prompt": [[1, *WRONG]]}),
        ("/v1/chat/completions", {"messages": [LONG]}),
        ("/v1/chat/completions", {"messages": [], "structured_outputs": {"choice": WRONG[:9000]}}),
        ("/v1/responses", {"input": WRONG}),
        ("/v1/messages", {"max_tokens": 1, "messages": WRONG}),
        ("/tokenize", {"messages": WRONG}),
        ("/detokenize", {"tokens": WRONG}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_of_a_list_only_the_first_wrong_value_is_told(http: httpx.Client, path: str, fields: dict[str, object]) -> None:
    """Each that is told costs microseconds, in which the server does nothing else."""
    answer = http.post(path, json={"model": "tiny-llama", **fields})
    assert answer.status_code == 400
    assert ".1" not in answer.json()["error"]["message"].replace(".1:", ".0:", 1)


def test_no_route_reads_json_that_gives_a_name_twice(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    takers = [
        (path, method)
        for path, methods in paths.items()
        for method, operation in methods.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    ]
    assert ("/v1/chat/completions", "post") in takers
    session = http.post("/v1/sessions").json()["id"]
    for path, method in takers:
        sent: Any = {"content": b'{"x": 1, "x": 2}', "headers": JSON}
        response = http.request(method, path.replace("{session_id}", session), **sent)
        if path.startswith("/v1/messages"):
            message = assert_messages_error(response, 400)
        else:
            message = assert_error(response, 400, "malformed_request")
        assert "gives x more than once" in message, path
