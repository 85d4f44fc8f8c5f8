"""A refused request is told, in the server's own words, its field, what the field takes, and what it was given."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

import app.wiring.routes
from app.domain.errors import FieldOutOfRange
from app.web.errors.field_schema import schema_of
from app.web.errors.problems import describe_problem
from app.wire.base import WireModel
from tests.errors import assert_error, assert_messages_error

assert app.wiring.routes.ROUTERS  # every request model is loaded
FOREIGN = re.compile(
    r"should|Input|validation|valid (string|integer|number|list|dict|bool)|"
    r"greater than|less than|value_error|ermitted|nable to|None|True"
)
"""Words of pydantic and of Python."""
SCALARS: list[object] = [None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "", "x", "y" * 2000, "\ud800"]
VALUES: list[object] = [
    *SCALARS,
    *([], [-1, "x", None], [["x"]] * 2000, [{}], {}, {"": 0, "1": "x", "9999999999": 1, "layer": -1}),
    [{"role": "user", "content": [{"type": "image"}]}, {"role": "tool"}, {"role": "x"}, {"role": "assistant"}],
    [{"op": "add", "vector": [float("nan")], "positions": [3, 2], "max_norm": 0}, {"op": "clamp", "vector": "?"}],
]


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
                for problem in refused.errors():
                    _, words = describe_problem(schema_of(model), dict(problem), problem["loc"])
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
        ({"logit_bias": {"a b": 1}}, "logit_bias.a b", "decimal digits"),
        ({"max_tokens": 10**4000}, "max_tokens", "max_tokens: an integer from 0 to 2147483647; got 1000"),
        ({"no such field": 1}, "no such field", "no such field: unknown field"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "messages.0.content: required"),
        ({"stream": 1}, "stream", "stream: true or false; got 1"),
    ],
)
def test_a_refusal_names_field_range_and_value(
    http: httpx.Client, body: dict[str, object], param: str, says: str
) -> None:
    session = http.post("/v1/sessions").json()["id"]
    response = http.post(f"/v1/sessions/{session}/generate", json={"prompt": "a", **body})
    assert says in assert_error(response, 422, "field_out_of_range", param=param)


WRONG = [None] * 50_000
LONG = {"role": "user", "content": WRONG}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [1, *WRONG]}),
        ("/v1/completions", {"prompt": [[1, *WRONG]]}),
        ("/v1/chat/completions", {"messages": WRONG}),
        ("/v1/chat/completions", {"messages": [LONG]}),
        ("/v1/chat/completions", {"messages": [], "structured_outputs": {"choice": WRONG[:9000]}}),
        ("/v1/responses", {"input": WRONG}),
        ("/v1/responses", {"input": [LONG]}),
        ("/v1/messages", {"max_tokens": 1, "messages": WRONG}),
        ("/v1/messages", {"max_tokens": 1, "messages": [LONG]}),
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


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"tools": {}}, "tools", "tools: a list of at most 128 items; got an object of 0"),
        ({"prediction": {"type": "x"}}, "prediction", "prediction: the server takes no predicted text"),
        ({"n": 0}, "n", "n: an integer from 1 to 128; got 0"),
        ({"messages": [5]}, "messages.0", "an object with a role and a content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content", "a string or a list of at least 1 item"),
    ],
)
def test_so_does_one_of_the_openai_routes(http: httpx.Client, body: dict[str, object], param: str, says: str) -> None:
    chat = {"model": "tiny-llama", "messages": [{"role": "user", "content": "a"}], **body}
    response = http.post("/v1/chat/completions", json=chat)
    assert says in assert_error(response, 400, "field_out_of_range", param=param)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("limit", "0", "limit: an integer from 1 to 100; got '0'"),
        ("limit", "9" * 5000, "limit: an integer from 1 to 100; got a string of 5000 characters"),
        ("state", "closed", "state: 'idle', 'queued', 'running' or 'paused'; got 'closed'"),
    ],
)
def test_so_does_a_query(http: httpx.Client, name: str, value: str, says: str) -> None:
    assert says in assert_error(http.get("/v1/sessions", params={name: value}), 422, "field_out_of_range", param=name)


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
        sent: Any = {"content": b'{"x": 1, "x": 2}', "headers": {"Content-Type": "application/json"}}
        response = http.request(method, path.replace("{session_id}", session), **sent)
        if path.startswith("/v1/messages"):
            message = assert_messages_error(response, 400)
        else:
            message = assert_error(response, 400, "malformed_request")
        assert "gives x more than once" in message, path
