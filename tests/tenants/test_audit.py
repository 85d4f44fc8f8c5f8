"""The audit log: who did what, and never what was said."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from tests.tenants.conftest import ServeTenants
from tests.tenants.tenant_files import key, tenant

SECRET = "swordfish"
FIELDS = {"time", "tenant", "request_id", "method", "path", "session", "status"}


def lines(log: Path, count: int) -> list[dict[str, Any]]:
    """The log once it has so many lines: a line follows the answer that it is about."""
    deadline = time.monotonic() + 30
    while len(found := log.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.005)
    assert len(found) == count
    return [json.loads(line) for line in found]


def test_a_line_for_each_request(serve_tenants: ServeTenants, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    http = serve_tenants(tenant("acme"), audit_log=log)("acme")
    session = http.post("/v1/sessions", headers={"X-Request-Id": "r1"}).json()["id"]
    http.post(f"/v1/sessions/{session}/generate", json={"prompt": "hi", "max_tokens": 1, "stream": True})
    chat = {"model": "tiny-llama", "prompt": "hi", "max_tokens": 1}
    bound = http.post("/v1/completions", json=chat, headers={"X-Session-ID": "mine"}).headers["x-session-id"]
    http.get("/v1/models", headers={"Authorization": "Bearer wrong"})
    http.get("/v1/sessions/ses_1")
    http.get("/no/such/path")
    found = lines(log, 6)
    assert all(line.keys() == FIELDS for line in found)
    assert found[0]["request_id"] == "r1"
    assert [(line["tenant"], line["method"], line["path"], line["session"], line["status"]) for line in found] == [
        ("acme", "POST", "/v1/sessions", session, 201),
        ("acme", "POST", "/v1/sessions/{session_id}/generate", session, 200),
        ("acme", "POST", "/v1/completions", bound, 200),
        (None, "GET", "/v1/models", None, 401),
        ("acme", "GET", "/v1/sessions/{session_id}", None, 404),
        ("acme", "GET", None, None, 404),
    ]
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_refused_request_is_a_line_that_says_what_it_wanted(serve_tenants: ServeTenants, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    client = serve_tenants(tenant("acme"), tenant("watch", role="metrics"), audit_log=log)
    session = client("acme").post("/v1/sessions").json()["id"]
    client("watch").get(f"/v1/sessions/{session}/history")
    client("acme").get("/metrics")
    client("acme").post("/v1/sessions", content="{}", headers={"Content-Encoding": "gzip"})
    client("wrong").delete(f"/v1/sessions/{session}")
    assert [(line["tenant"], line["path"], line["session"], line["status"]) for line in lines(log, 5)[1:]] == [
        ("watch", "/v1/sessions/{session_id}/history", session, 403),
        ("acme", "/metrics", None, 403),
        ("acme", "/v1/sessions", None, 415),
        (None, "/v1/sessions/{session_id}", session, 401),
    ]


def test_no_line_holds_what_was_said(serve_tenants: ServeTenants, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    http = serve_tenants(tenant("acme", key(SECRET)), audit_log=log)(SECRET)
    session = http.post("/v1/sessions", json={"metadata": {"a": SECRET}}).json()["id"]
    http.post(f"/v1/sessions/{session}/generate", json={"prompt": SECRET, "max_tokens": 1})
    http.post(f"/v1/sessions/{SECRET}/generate", json={"prompt": SECRET})
    http.get(f"/{SECRET}?{SECRET}={SECRET}")
    http.post("/v1/completions", json={"model": SECRET, "prompt": SECRET}, headers={"X-Session-ID": SECRET})
    http.post("/v1/messages", json={"model": "tiny-llama", "max_tokens": 1, "system": SECRET, "messages": []})
    http.request(SECRET, "/v1/models")  # any word is a method in HTTP
    found = lines(log, 7)
    assert found[-1]["method"] is None
    assert SECRET not in log.read_text().lower()


def test_a_websocket_is_a_line_when_it_has_closed(serve_tenants: ServeTenants, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    http = serve_tenants(tenant("acme", requests_per_minute=2), audit_log=log)("acme")
    url = str(http.base_url).replace("http", "ws")
    create = json.dumps({"type": "response.create", "model": "tiny-llama", "input": "a", "max_output_tokens": 1})
    with connect(f"{url}/v1/responses", additional_headers={"X-Api-Key": "acme"}) as socket:
        socket.send(create)
        while json.loads(socket.recv())["type"] not in ("response.completed", "response.incomplete"):
            pass
        socket.send(create)
        refused = json.loads(socket.recv())
    assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
    assert refused["headers"] == {"Retry-After": "60"}
    (line,) = lines(log, 1)
    assert (line["tenant"], line["path"], line["status"]) == ("acme", "/v1/responses", 101)
