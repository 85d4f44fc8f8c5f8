from __future__ import annotations

import httpx
import pytest

from tests.conftest import ServeWith
from tests.errors import assert_error

PATHS = [
    "/metrics",
    "/version",
    "/openapi.json",
    "/v1/sessions",
    "/v1/models",
    "/no-such-path",
    "/static",
]


@pytest.fixture
def guarded(serve_with: ServeWith) -> httpx.Client:
    return serve_with(api_keys=("sesame", "mellon", "cl\xe0"))


def test_every_path_but_those_of_probes_needs_a_key(guarded: httpx.Client) -> None:
    for path in ("/health", "/ready"):
        assert guarded.get(path).status_code == 200
    for path in PATHS:
        response = guarded.get(path)
        assert_error(response, 401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert_error(guarded.post("/v1/sessions", content=b"{"), 401, "invalid_api_key")


@pytest.mark.parametrize(
    "header", ["Bearer wrong", "Bearer", "Basic sesame", "sesame", "Bearer sesam", "Bearer sesamee", "Bearer \xe9"]
)
def test_a_wrong_key_is_no_key(guarded: httpx.Client, header: str) -> None:
    response = guarded.get("/v1/sessions", headers={b"Authorization": header.encode("latin-1")})
    assert_error(response, 401, "invalid_api_key")


def test_each_key_opens_in_either_header(guarded: httpx.Client) -> None:
    right = [("Authorization", f"{kind} {key}") for kind in ("Bearer", "bearer") for key in ("sesame", "mellon")]
    for name, value in [*right, ("X-Api-Key", "sesame"), ("x-api-key", "mellon")]:
        assert guarded.get("/v1/sessions", headers={name: value}).status_code == 200
    for wrong in ("sesam", "Bearer sesame", ""):
        assert_error(guarded.get("/v1/sessions", headers={"X-Api-Key": wrong}), 401, "invalid_api_key")
    opened = guarded.post("/v1/sessions", headers={"X-Api-Key": "sesame"}).json()["id"]
    for headers, status in (({"Authorization": "Bearer sesame"}, 200), ({"X-Api-Key": "mellon"}, 404)):
        assert guarded.get(f"/v1/sessions/{opened}", headers=headers).status_code == status


def test_a_key_outside_ascii_is_sent_as_utf8(guarded: httpx.Client) -> None:
    header = "Bearer cl\xe0"
    assert guarded.get("/v1/sessions", headers={b"Authorization": header.encode()}).status_code == 200
    assert guarded.get("/v1/sessions", headers={b"Authorization": header.encode("latin-1")}).status_code == 401


def test_the_document_tells_which_routes_need_a_key_and_how_it_is_given(guarded: httpx.Client) -> None:
    document = guarded.get("/openapi.json", headers={"X-Api-Key": "sesame"}).json()
    for path, operations in document["paths"].items():
        if "{" not in path and "get" in operations:
            needs_key = operations["get"].get("security", document["security"]) != []
            assert (guarded.get(path).status_code == 401) == needs_key, path
    schemes = document["components"]["securitySchemes"]
    assert [each for each in document["security"] if each] == [{name: []} for name in schemes]
    for scheme in schemes.values():
        header = (
            {"Authorization": f"{scheme['scheme']} sesame"} if scheme["type"] == "http" else {scheme["name"]: "sesame"}
        )
        assert guarded.get("/v1/sessions", headers=header).status_code == 200
