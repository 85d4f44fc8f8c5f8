"""What a route does not take is refused, on every route there is."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.errors import assert_error, assert_messages_error

Route = tuple[str, str, dict[str, Any]]
NEEDED = {"tokens": "1", "name": "v"}
"""Query parameters that some routes cannot do without."""


def routes(http: httpx.Client) -> list[Route]:
    """Method, path of a session that is there, and description of every documented route."""
    session = http.post("/v1/sessions").json()["id"]
    return [
        (method.upper(), path.replace("{session_id}", session).replace("{model}", "tiny-llama"), operation)
        for path, operations in http.get("/openapi.json").json()["paths"].items()
        for method, operation in operations.items()
    ]


def test_no_route_takes_an_unknown_query_parameter(http: httpx.Client, subtests: pytest.Subtests) -> None:
    for method, path, operation in routes(http):
        with subtests.test(operation["operationId"]):
            asked = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]
            needed = {name: value for name, value in NEEDED.items() if name in asked}
            response = http.request(method, path, params={**needed, "junk": 1})
            if "anthropic" in operation["tags"]:
                assert "junk" in assert_messages_error(response, 400)
                continue
            status = 400 if "openai" in operation["tags"] else 422
            assert "junk" in assert_error(response, status, "field_out_of_range", param="junk")


def test_no_route_without_a_body_takes_one(http: httpx.Client, subtests: pytest.Subtests) -> None:
    without = [route for route in routes(http) if "requestBody" not in route[2]]
    assert len(without) > 10
    for method, path, operation in without:
        with subtests.test(f"{method} {path}"):
            response = http.request(method, path, json={"at_token": 4})
            status = 400 if "openai" in operation["tags"] else 422
            assert_error(response, status, "field_out_of_range", param="body")


@pytest.mark.parametrize("empty", [b"", b"{}", b" { }\n"])
def test_an_empty_object_is_no_body(http: httpx.Client, empty: bytes) -> None:
    session = http.post("/v1/sessions").json()["id"]
    response = http.post(f"/v1/sessions/{session}/fork", content=empty, headers={"Content-Type": "application/json"})
    assert response.status_code == 201


def test_a_parameter_that_is_given_twice_is_refused(http: httpx.Client) -> None:
    response = http.get("/v1/sessions?limit=1&limit=2")
    assert "once" in assert_error(response, 422, "field_out_of_range", param="limit")
    assert len(http.get("/v1/sessions?limit=1").json()["data"]) <= 1


def test_what_is_refused_changes_nothing(http: httpx.Client) -> None:
    path = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
    assert http.request("DELETE", path, json={"force": True}).status_code == 422
    assert http.get(path).status_code == 200
