"""What holds for every route there is: what it refuses, its id, and its place in the document."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.errors import assert_error

Route = tuple[str, str, dict[str, Any]]
NEEDED = {"tokens": "1", "name": "v", "dictionary": "d"}
"""Query parameters that some routes cannot do without."""


def routes(http: httpx.Client) -> list[Route]:
    """Method, path of a session that is there, and description of every documented route."""
    session = http.post("/v1/sessions").json()["id"]
    return [
        (method.upper(), path.replace("{session_id}", session).replace("{model}", "tiny-llama"), operation)
        for path, operations in http.get("/openapi.json").json()["paths"].items()
        for method, operation in operations.items()
    ]


def test_an_unknown_query_parameter_is_refused_or_named(http: httpx.Client, subtests: pytest.Subtests) -> None:
    for method, path, operation in routes(http):
        with subtests.test(operation["operationId"]):
            asked = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]
            needed = {name: value for name, value in NEEDED.items() if name in asked}
            if operation["operationId"] == "getAttribution":
                needed["tokens"] = "1,2"
            response = http.request(method, path, params={**needed, "junk": 1})
            if operation.get("security") == []:  # probes add some
                assert response.status_code == 200
            elif {"openai", "anthropic"} & set(operation["tags"]):  # as unknown fields are
                assert "junk" not in response.text
                assert response.is_error or response.headers["x-djinn-ignored"] == "junk"
            else:
                assert "junk" in assert_error(response, 422, "field_out_of_range", param="junk")
    twice = http.get("/v1/sessions?limit=1&limit=2")
    assert "once" in assert_error(twice, 422, "field_out_of_range", param="limit")


def test_what_reads_json_answers_head_without_a_body(http: httpx.Client, subtests: pytest.Subtests) -> None:
    for method, path, operation in routes(http):
        with subtests.test(operation["operationId"]):
            content = operation["responses"].get("200", {}).get("content", {})
            asked = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"}
            params = {name: value for name, value in NEEDED.items() if name in asked}
            if method == "GET" and (path == "/metrics" or content.keys() == {"application/json"}):
                head, whole = http.head(path, params=params), http.get(path, params=params)
                assert (head.status_code, head.content) == (whole.status_code, b"")
    assert http.head("/v1/models").headers["content-length"] == http.get("/v1/models").headers["content-length"]
    assert http.head("/v1/events").status_code == 405


def test_no_route_without_a_body_takes_one(http: httpx.Client, subtests: pytest.Subtests) -> None:
    without = [route for route in routes(http) if "requestBody" not in route[2]]
    assert len(without) > 10
    for method, path, operation in without:
        with subtests.test(f"{method} {path}"):
            response = http.request(method, path, json={"at_token": 4})
            status = 400 if "openai" in operation["tags"] else 422
            assert_error(response, status, "field_out_of_range", param="body")


def test_an_empty_object_is_no_body_and_what_is_refused_changes_nothing(http: httpx.Client) -> None:
    path = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
    for empty in (b"", b" { }\n"):
        response = http.post(f"{path}/fork", content=empty, headers={"Content-Type": "application/json"})
        assert response.status_code == 201
    assert http.request("DELETE", path, json={"force": True}).status_code == 422
    assert http.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/no-such-path"])
def test_every_answer_has_its_own_id_or_the_clients_and_a_line_end_for_curl(http: httpx.Client, path: str) -> None:
    assert len({http.get(path).headers["x-request-id"] for _ in range(3)}) == 3
    response = http.get(path, headers={"X-Request-Id": "trace-7f.3:a_B"})
    assert response.headers["x-request-id"] == "trace-7f.3:a_B"
    of_curl = http.get(path, headers={"User-Agent": "curl/8.14.1"})
    assert (len(of_curl.content), of_curl.content[-2:]) == (int(of_curl.headers["content-length"]), b"}\n")
    for harmful in ("", "x" * 129, "a\x7f", '"><script>'):
        response = http.get(path, headers={b"X-Request-Id": harmful.encode("latin-1")})
        assert response.headers["x-request-id"] not in ("", harmful)


def objects(node: Any) -> Iterator[dict[str, Any]]:
    """Every object in `node`."""
    if isinstance(node, dict):
        yield node
    if isinstance(node, dict | list):
        for each in node.values() if isinstance(node, dict) else node:
            yield from objects(each)


def test_the_members_of_a_union_require_what_tells_them_apart_and_no_list_or_default_is_of_one(
    http: httpx.Client,
) -> None:
    """As generators of clients need it."""
    components = http.get("/openapi.json").json()["components"]["schemas"]

    def resolve(schema: dict[str, Any]) -> Any:
        return components[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    found = list(objects(components))
    tagged = [schema for schema in found if "discriminator" in schema]
    assert len(tagged) >= 10
    for schema in tagged:
        assert all(schema["discriminator"]["propertyName"] in resolve(each)["required"] for each in schema["oneOf"])
    assert [schema for schema in found if schema.get("type") == "array" and "oneOf" in schema["items"]] == []
    members = [member for schema in found for member in schema.get("oneOf", ()) if member.get("type") == "array"]
    assert members
    assert not any({"oneOf", "anyOf"} & resolve(member["items"]).keys() for member in members)
    assert [schema for schema in found if isinstance(schema.get("default"), dict) and "anyOf" in schema] == []
