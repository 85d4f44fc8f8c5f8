"""How much KV a tenant may have: of turns under way, and in host memory."""

from __future__ import annotations

import httpx

from tests.errors import assert_error
from tests.tenants.conftest import ServeTenants
from tests.tenants.tenant_files import tenant, turn, wait_for


def test_bytes_of_kv_of_turns_under_way(serve_tenants: ServeTenants, http: httpx.Client) -> None:
    per_token = kv_of_64(http) // 64
    client = serve_tenants(tenant("few", device_bytes=40 * per_token), tenant("many"))
    few, many = client("few"), client("many")
    paused = few.post("/v1/sessions").json()["id"]
    few.post(f"/v1/sessions/{paused}/breakpoints", json={"layer": 0, "action": "pause"})
    few.post(f"/v1/sessions/{paused}/generate", json={"token_ids": [5] * 20, "max_tokens": 4, "ignore_eos": True})
    assert turn(few, tokens=20, max_tokens=1).status_code == 200
    refused = turn(few, tokens=21, max_tokens=1)
    message = assert_error(refused, 429, "tenant_limit")
    assert f"they have {20 * per_token}, and this call needs {21 * per_token}" in message
    assert refused.headers["retry-after"] == "1"
    choices = {"model": "tiny-llama", "prompt": [5] * 8, "max_tokens": 1, "n": 3}
    assert_error(few.post("/v1/completions", json=choices), 429, "tenant_limit")
    assert turn(many, tokens=200, max_tokens=1).status_code == 200
    few.post(f"/v1/sessions/{paused}/cancel")
    assert turn(few, tokens=40, max_tokens=1).status_code == 200


def test_kv_of_a_session_counts_with_its_next_turn(serve_tenants: ServeTenants, http: httpx.Client) -> None:
    per_token = kv_of_64(http) // 64
    few = serve_tenants(tenant("few", device_bytes=40 * per_token))("few")
    session = few.post("/v1/sessions").json()["id"]
    path = f"/v1/sessions/{session}/generate"
    assert few.post(path, json={"token_ids": [5] * 30, "max_tokens": 4, "ignore_eos": True}).status_code == 200
    refused = few.post(path, json={"token_ids": [5] * 7, "max_tokens": 1})
    message = assert_error(refused, 422, "beyond_tenant_limit")  # it would be in vain to come again
    assert f"this call alone needs {41 * per_token}" in message
    assert "retry-after" not in refused.headers
    assert few.post(path, json={"token_ids": [5] * 6, "max_tokens": 1}).status_code == 200


def test_bytes_in_host_memory(serve_tenants: ServeTenants, http: httpx.Client) -> None:
    one = kv_of_64(http)
    client = serve_tenants(tenant("few", host_bytes=2 * one), tenant("many"), kv_host=64 << 20)
    sessions = {name: [parked(client(name), number) for number in range(4)] for name in ("few", "many")}
    wait_for(lambda: sum(host_bytes(client("few"), each) for each in sessions["few"]) <= 2 * one)
    assert [host_bytes(client("few"), each) > 0 for each in sessions["few"]] == [False, False, True, True]
    assert all(host_bytes(client("many"), each) > 0 for each in sessions["many"])


def kv_of_64(http: httpx.Client) -> int:
    """Bytes of a context of 64 tokens, which are whole blocks."""
    return int(http.get("/v1/memory/estimate", params={"tokens": 64}).json()["kv_bytes"])


def parked(http: httpx.Client, number: int) -> str:
    """A session of 64 tokens of its own, whose KV is in host memory."""
    session = str(http.post("/v1/sessions").json()["id"])
    body = {"token_ids": [5 + number] * 64, "max_tokens": 1, "ignore_eos": True}
    assert http.post(f"/v1/sessions/{session}/generate", json=body).status_code == 200
    http.post(f"/v1/sessions/{session}/phase", json={"phase": "io_wait"})
    wait_for(lambda: host_bytes(http, session) > 0)
    return session


def host_bytes(http: httpx.Client, session: str) -> int:
    return int(http.get(f"/v1/sessions/{session}").json()["kv"]["host_bytes"])
