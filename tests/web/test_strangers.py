"""What one tenant makes is out of reach of another, by every route that there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving import serve
from tests.tenants.tenant_files import tenant, write_tenants

OWNER, STRANGER = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
BODILESS = {"get", "delete", "head"}


@pytest.fixture(scope="module", params=["keys", "file"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server that has its two tenants from their keys, or from a file."""
    settings: dict[str, Any] = {"api_keys": ("one", "two")}
    if request.param == "file":
        file = tmp_path_factory.mktemp("tenants") / "tenants.json"
        settings = {"tenants": write_tenants(file, tenant("one"), tenant("two"))}
    with serve(**settings) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def test_no_route_gives_a_stranger_a_session(guarded: httpx.Client) -> None:
    session = guarded.post("/v1/sessions", headers=OWNER).json()["id"]
    turn = {"token_ids": [5, 6, 7], "max_tokens": 2}
    guarded.post(f"/v1/sessions/{session}/generate", json=turn, headers=OWNER).raise_for_status()
    before = guarded.get(f"/v1/sessions/{session}", headers=OWNER).json()
    paths = guarded.get("/openapi.json", headers=OWNER).json()["paths"]
    routes = [(path, method) for path, methods in paths.items() if "{session_id}" in path for method in methods]
    assert len(routes) > 15
    answers = {}
    for path, method in routes:
        url = path.replace("{session_id}", session).replace("{breakpoint_id}", "bp_1").replace("{capture_id}", "cap_1")
        json: dict[str, str] | None = None if method in BODILESS else {}
        answers[path, method] = guarded.request(method, url, headers=STRANGER, json=json).status_code
    refused_for_their_form = {route for route, status in answers.items() if status in (400, 415, 422)}
    assert answers.pop(("/v1/sessions/{session_id}/move", "post")) == 403  # no user moves any session
    assert {route for route, status in answers.items() if status != 404} == refused_for_their_form
    assert not any(method in BODILESS for _, method in refused_for_their_form)
    assert guarded.get(f"/v1/sessions/{session}", headers=OWNER).json() == before
    assert session not in guarded.get("/v1/sessions", headers=STRANGER).text
