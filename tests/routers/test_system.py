from __future__ import annotations

from importlib.metadata import version

import httpx
import pytest

from tests.conftest import ServeWith
from tests.errors import assert_error


def test_health_and_ready(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}


def test_version_names_what_runs(http: httpx.Client) -> None:
    found = http.get("/version").json()
    assert found == {"version": version("djinn"), "model": "tiny-llama", "device": "cpu", "dtype": "float32"}


def test_the_served_name_is_the_operators(serve_with: ServeWith) -> None:
    assert serve_with(served_name="house-model").get("/version").json()["model"] == "house-model"


def test_memory_counts_what_sessions_hold(serve_with: ServeWith) -> None:
    http = serve_with()
    empty = http.get("/v1/memory").json()
    assert empty["sessions"] == 0
    assert empty["data"]["owned_bytes"] == 0
    assert empty["data"]["total_bytes"] == 4 << 20
    session = http.post("/v1/sessions").json()["id"]
    http.post(f"/v1/sessions/{session}/generate", json={"token_ids": [5] * 40, "max_tokens": 1})
    held = http.get("/v1/memory").json()
    assert held["sessions"] == held["sessions_resident"] == 1
    assert held["data"]["owned_bytes"] == 3 * held["data"]["block_bytes"]
    http.delete(f"/v1/sessions/{session}")
    assert http.get("/v1/memory").json()["data"]["owned_bytes"] == 0


def test_the_estimate_is_what_a_session_then_takes(serve_with: ServeWith) -> None:
    http = serve_with()
    estimate = http.get("/v1/memory/estimate", params={"tokens": 100}).json()
    session = http.post("/v1/sessions").json()["id"]
    http.post(f"/v1/sessions/{session}/generate", json={"token_ids": [5] * 100, "max_tokens": 0})
    kv = http.get(f"/v1/sessions/{session}").json()["kv"]
    assert estimate["blocks"] == kv["blocks"] == 7
    assert estimate["kv_bytes"] == kv["device_bytes"]
    assert estimate["sessions_resident"] == 256 // 7


@pytest.mark.parametrize("tokens", ["0", "-1", "many", str(10**9 + 1)])
def test_an_estimate_for_no_size_is_refused(http: httpx.Client, tokens: str) -> None:
    response = http.get("/v1/memory/estimate", params={"tokens": tokens})
    assert_error(response, 422, "field_out_of_range", param="tokens")


def test_operation_ids_are_short_and_stable(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    named = {operation["operationId"] for path in paths.values() for operation in path.values()}
    assert {
        "createSession",
        "listSessions",
        "getSession",
        "closeSession",
        "generate",
        "cancelTurn",
        "forkSession",
        "rewindSession",
        "getHealth",
        "getReady",
        "getMetrics",
        "getVersion",
        "getMemory",
        "estimateMemory",
    } <= named
    assert all(name.isidentifier() and "_" not in name for name in named)
