"""Who is let in, and what each role reaches on every route that the document has."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.serving import serve
from tests.tenants.tenant_files import tenant, write_tenants

PATHS = ["/metrics", "/version", "/openapi.json", "/v1/sessions", "/no-such-path", "/static"]


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


def test_each_key_opens_in_either_header_and_a_wrong_one_is_no_key(guarded: httpx.Client) -> None:
    right = [("Authorization", f"{kind} {key}") for kind in ("Bearer", "bearer") for key in ("sesame", "mellon")]
    for name, value in [*right, ("X-Api-Key", "sesame"), ("x-api-key", "mellon")]:
        assert guarded.get("/v1/sessions", headers={name: value}).status_code == 200
    in_utf8 = {b"Authorization": "Bearer cl\xe0".encode()}
    assert guarded.get("/v1/sessions", headers=in_utf8).status_code == 200
    for wrong in ("Bearer", "Basic sesame", "sesame", "Bearer sesam", "Bearer cl\xe0"):
        response = guarded.get("/v1/sessions", headers={b"Authorization": wrong.encode("latin-1")})
        assert_error(response, 401, "invalid_api_key")
    for wrong in ("sesam", "Bearer sesame", ""):
        assert_error(guarded.get("/v1/sessions", headers={"X-Api-Key": wrong}), 401, "invalid_api_key")
    opened = guarded.post("/v1/sessions", headers={"X-Api-Key": "sesame"}).json()["id"]
    for headers, status in (({"Authorization": "Bearer sesame"}, 200), ({"X-Api-Key": "mellon"}, 404)):
        assert guarded.get(f"/v1/sessions/{opened}", headers=headers).status_code == status


def test_the_document_tells_which_routes_need_a_key_and_how_it_is_given(guarded: httpx.Client) -> None:
    document = guarded.get("/openapi.json", headers={"X-Api-Key": "sesame"}).json()
    for path, operations in document["paths"].items():
        if "{" not in path and "get" in operations:
            needs_key = operations["get"].get("security", document["security"]) != []
            assert (guarded.get(path).status_code == 401) == needs_key, path
    schemes = document["components"]["securitySchemes"]
    assert [each for each in document["security"] if each] == [{name: []} for name in schemes]
    for scheme in schemes.values():
        is_http = scheme["type"] == "http"
        header = {"Authorization": f"{scheme['scheme']} sesame"} if is_http else {scheme["name"]: "sesame"}
        assert guarded.get("/v1/sessions", headers=header).status_code == 200


ClientOf = Callable[[str], httpx.Client]

REACHED_BY_OPERATOR = {
    ("get", "/v1/sessions/{session_id}"),
    ("get", "/v1/sessions/{session_id}/timeline"),
    ("delete", "/v1/sessions/{session_id}"),
}
"""All that an operator may do with a session of another tenant."""
MOVES = {("post", f"/v1/sessions/{{session_id}}/{step}") for step in ("move", "settle")}
"""What no user may do with any session."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientOf]:
    roles = {"alice": "user", "bob": "user", "olga": "operator", "graf": "metrics"}
    folder: Path = tmp_path_factory.mktemp("tenants")
    file = write_tenants(folder / "tenants.json", *(tenant(name, role=role) for name, role in roles.items()))
    with serve(tenants=file) as url, ExitStack() as ends:
        yield {
            name: ends.enter_context(httpx.Client(base_url=url, timeout=30, headers={"X-Api-Key": name}))
            for name in roles
        }.__getitem__


@pytest.fixture(scope="module")
def routes(client: ClientOf) -> list[tuple[str, str]]:
    paths = client("olga").get("/openapi.json").json()["paths"]
    found = [(method, path) for path, operations in paths.items() for method in operations]
    assert len(found) > 40
    return found


def fill(path: str, session: str) -> str:
    return path.replace("{session_id}", session).replace("{", "").replace("}", "")


def ask(http: httpx.Client, method: str, path: str) -> httpx.Response:
    with http.stream(method, path, json={} if method in ("post", "put") else None) as answer:
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):  # the live stream has no end
            answer.read()
    return answer


def test_the_role_metrics_reads_figures_and_nothing_else(client: ClientOf, routes: list[tuple[str, str]]) -> None:
    http = client("graf")
    for method, path in [*routes, ("get", "/openapi.json"), ("get", "/none")]:
        answer = ask(http, method, fill(path, "ses_1"))
        allowed = path in ("/metrics", "/ready", "/health")
        assert (answer.status_code == 200) == allowed, path
        assert (answer.status_code == 403) != allowed, path
    refused = http.get("/v1/sessions")
    assert_error(refused, 403, "wrong_role")
    message = http.post("/v1/messages", json={}).json()
    assert message["error"]["type"] == "permission_error"


def test_a_user_reads_all_but_the_figures_of_everybody(client: ClientOf, routes: list[tuple[str, str]]) -> None:
    http = client("alice")
    refused = {path for method, path in routes if ask(http, method, fill(path, "ses_1")).status_code == 403}
    refusing = {path for _, path in MOVES} | {"/metrics", "/v1/models/load", "/v1/models/unload"}
    assert refused == refusing


def test_a_users_session_is_nobody_elses_on_any_route(client: ClientOf, routes: list[tuple[str, str]]) -> None:
    alice = client("alice")
    session = alice.post("/v1/sessions").json()["id"]
    alice.post(f"/v1/sessions/{session}/generate", json={"token_ids": [5, 6], "max_tokens": 1})
    before = alice.get(f"/v1/sessions/{session}").json()
    of_sessions = [(method, path) for method, path in routes if "{session_id}" in path]
    assert len(of_sessions) > 15
    for name, reached in (("bob", set()), ("olga", REACHED_BY_OPERATOR)):
        for method, path in of_sessions:
            if (method, path) not in reached:
                answer = ask(client(name), method, fill(path, session))
                # What is wrong with the request itself may be told first, and tells nothing of the session.
                refusals = (403,) if name == "bob" and (method, path) in MOVES else (404, 422)
                assert answer.status_code in refusals, (name, method, path, answer.text)
    assert alice.get(f"/v1/sessions/{session}").json() == before
    assert session not in client("bob").get("/v1/sessions").text
    alice.delete(f"/v1/sessions/{session}")


def test_an_operator_lists_and_closes_any_session_and_reads_nothing_that_its_client_has_written(
    client: ClientOf,
) -> None:
    names = ("alice", "bob", "olga")
    alice, bob, olga = map(client, names)
    ids = {name: client(name).post("/v1/sessions", json={"metadata": {"for": name}}).json()["id"] for name in names}
    listed = {each["id"]: each for each in olga.get("/v1/sessions?limit=100").json()["data"]}
    assert [listed[ids[name]]["tenant"] for name in names] == list(names)
    assert [listed[ids[name]]["metadata"] for name in names] == [{}, {}, {"for": "olga"}]
    assert {each["tenant"] for each in bob.get("/v1/sessions").json()["data"]} == {"bob"}
    after = {"after": ids["alice"]}
    assert olga.get("/v1/sessions", params=after).status_code == 200
    assert_error(bob.get("/v1/sessions", params=after), 422, "field_out_of_range", param="after")
    seen = olga.get(f"/v1/sessions/{ids['alice']}").json()
    assert (seen["state"], seen["metadata"]) == ("idle", {})
    assert alice.get(f"/v1/sessions/{ids['alice']}").json()["metadata"] == {"for": "alice"}
    assert [olga.delete(f"/v1/sessions/{each}").status_code for each in ids.values()] == [204] * 3
    assert alice.get(f"/v1/sessions/{ids['alice']}").status_code == 404


def test_memory_is_ones_own_part_but_for_an_operator(client: ClientOf) -> None:
    alice, bob, olga = client("alice"), client("bob"), client("olga")
    nobody = bob.get("/v1/memory").json()
    session = alice.post("/v1/sessions").json()["id"]
    alice.post(f"/v1/sessions/{session}/breakpoints", json={"layer": 0, "action": "pause"})
    paused = alice.post(f"/v1/sessions/{session}/generate", json={"token_ids": [5] * 40, "max_tokens": 1}).json()
    mine, whole = alice.get("/v1/memory").json(), olga.get("/v1/memory").json()
    assert bob.get("/v1/memory").json() == nobody
    held = alice.get(f"/v1/sessions/{session}").json()["kv"]["device_bytes"]
    assert mine["data"]["device"]["owned_bytes"] == held > 0
    assert mine["data"]["device"]["total_bytes"] == whole["data"]["device"]["total_bytes"]
    assert mine["stack"]["checkpoints"] == 1
    assert mine["stack"]["checkpoint_bytes"] == paused["checkpoint"]["bytes"]
    assert (mine["moves"], mine["counts"], mine["tenants"]) == ({}, None, None)
    assert whole["tenants"]["alice"]["device_bytes"] == held
    assert whole["counts"] is not None
    assert nobody["stack"] == {"checkpoints": 0, "checkpoint_bytes": 0, "capture_bytes": 0}
    alice.delete(f"/v1/sessions/{session}")


def test_the_only_key_of_the_short_form_is_the_operators_and_several_see_nothing_of_each_other(
    serve_with: ServeWith,
) -> None:
    http = serve_with(api_keys=("one",))
    http.headers["X-Api-Key"] = "one"
    session = http.post("/v1/sessions").json()
    assert "djinn_sessions 1.0" in http.get("/metrics").text
    assert list(http.get("/v1/memory").json()["tenants"]) == [session["tenant"]]
    http = serve_with(api_keys=("one", "two"))
    one, two = {"X-Api-Key": "one"}, {"X-Api-Key": "two"}
    http.post("/v1/sessions", headers=one)
    assert_error(http.get("/metrics", headers=two), 403, "wrong_role")
    assert http.get("/v1/memory", headers=two).json()["sessions"] == 0
    assert http.get("/v1/memory", headers=one).json()["sessions"] == 1
