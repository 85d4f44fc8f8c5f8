"""A tenant's own limits, on a clock of the test's."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.errors import assert_error, assert_messages_error
from tests.tenants.conftest import ServeTenants
from tests.tenants.tenant_files import Clock, tenant, turn, wait_for


def connect_responses(http: httpx.Client, api_key: str) -> ClientConnection:
    url = str(http.base_url).replace("http", "ws")
    return connect(f"{url}/v1/responses", additional_headers={"X-Api-Key": api_key})


def test_requests_of_a_minute(serve_tenants: ServeTenants, clock: Clock) -> None:
    client = serve_tenants(tenant("few", requests_per_minute=2), tenant("many"))
    few, many = client("few"), client("many")
    first = few.get("/v1/models")
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "1m0s"
    clock.now += 20.5
    assert few.get("/v1/models").headers["x-ratelimit-remaining-requests"] == "0"
    refused = few.get("/v1/models")
    assert_error(refused, 429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "40"
    assert refused.headers["x-ratelimit-reset-requests"] == "39.5s"
    assert many.get("/v1/models").status_code == 200
    assert "x-ratelimit-limit-requests" not in many.get("/v1/models").headers
    clock.now += int(refused.headers["retry-after"])
    assert few.get("/v1/models").status_code == 200


def tokens_left(http: httpx.Client) -> int:
    return int(http.get("/v1/models").headers["x-ratelimit-remaining-tokens"])


def test_each_dialect_has_its_own_refusal(serve_tenants: ServeTenants) -> None:
    few = serve_tenants(tenant("few", requests_per_minute=1))("few")
    few.get("/v1/models")
    chat = few.post("/v1/chat/completions", json={"model": "tiny-llama", "messages": []})
    assert_error(chat, 429, "rate_limit_exceeded")
    assert chat.json()["error"]["type"] == "rate_limit_error"
    message = few.post("/v1/messages", json={"model": "tiny-llama", "max_tokens": 1, "messages": []})
    assert_messages_error(message, 429)
    assert message.json()["error"]["type"] == "rate_limit_error"
    response = few.post("/v1/responses", json={"model": "tiny-llama", "input": "a"})
    assert_error(response, 429, "rate_limit_exceeded")
    with pytest.raises(InvalidStatus) as refused, connect_responses(few, "few"):
        pass
    assert refused.value.response.status_code == 429
    assert int(refused.value.response.headers["retry-after"]) >= 1
    for answer in (chat, message, response):
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"


def test_reserved_tokens_that_were_not_used_come_back(serve_tenants: ServeTenants) -> None:
    few = serve_tenants(tenant("few", tokens_per_minute=100))("few")
    paused = pause(few, tokens=10, max_tokens=50, stop_token_ids=list(range(64)))
    assert tokens_left(few) == 100 - 10 - 50
    answer = few.post(f"/v1/sessions/{paused}/resume", json={"until": "end"}).json()
    used = answer["usage"]["completion_tokens"]
    assert used < 50
    assert tokens_left(few) == 100 - 10 - used


def test_tokens_that_the_server_still_has_do_not_count(serve_tenants: ServeTenants) -> None:
    http = serve_tenants(tenant("few", tokens_per_minute=100))("few")
    session = http.post("/v1/sessions").json()["id"]
    for _ in range(2):
        body = {"token_ids": [5] * 20, "max_tokens": 2, "ignore_eos": True}
        answer = http.post(f"/v1/sessions/{session}/generate", json=body)
        assert answer.status_code == 200
    assert http.get("/v1/models").headers["x-ratelimit-remaining-tokens"] == "56"


def test_tokens_of_a_minute(serve_tenants: ServeTenants, clock: Clock) -> None:
    client = serve_tenants(tenant("few", tokens_per_minute=100), tenant("many"))
    few, many = client("few"), client("many")
    assert turn(few, tokens=80, max_tokens=1).status_code == 200
    refused = turn(few, tokens=20, max_tokens=1)
    message = assert_error(refused, 429, "rate_limit_exceeded")
    assert "100 tokens in a minute, and 19 are left; this call needs 21" in message
    assert refused.headers["retry-after"] == "60"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "19"
    assert turn(many, tokens=80, max_tokens=1).status_code == 200
    clock.now += 60
    assert turn(few, tokens=20, max_tokens=1).status_code == 200


def test_a_turn_larger_than_a_minute_waits_for_a_new_one_and_counts_in_full(
    serve_tenants: ServeTenants, clock: Clock
) -> None:
    few = serve_tenants(tenant("few", tokens_per_minute=50))("few")
    assert turn(few, tokens=1, max_tokens=1).status_code == 200
    assert_error(turn(few, tokens=80, max_tokens=1), 429, "rate_limit_exceeded")
    clock.now += 60
    assert turn(few, tokens=80, max_tokens=1).status_code == 200
    assert few.get("/v1/models").headers["x-ratelimit-remaining-tokens"] == "0"


def test_tokens_of_a_refused_turn_are_not_counted(serve_tenants: ServeTenants) -> None:
    few = serve_tenants(tenant("few", tokens_per_minute=50))("few")
    session = few.post("/v1/sessions").json()["id"]
    assert_error(
        few.post(f"/v1/sessions/{session}/generate", json={"token_ids": [], "max_tokens": 5}),
        422,
        "field_out_of_range",
        param="token_ids",
    )
    assert few.get("/v1/models").headers["x-ratelimit-remaining-tokens"] == "50"


def test_every_choice_of_a_call_counts(serve_tenants: ServeTenants) -> None:
    few = serve_tenants(tenant("few", tokens_per_minute=100, turns_at_once=3))("few")
    body = {"model": "tiny-llama", "prompt": [5] * 10, "max_tokens": 4, "n": 3, "ignore_eos": True}
    answer = few.post("/v1/completions", json=body)
    assert answer.status_code == 200
    left = int(few.get("/v1/models").headers["x-ratelimit-remaining-tokens"])
    assert 100 - 3 * 10 - 3 * 4 <= left <= 100 - 10 - 3 * 4  # the other choices may find the prompt's KV
    assert_error(few.post("/v1/completions", json={**body, "n": 4}), 400, "beyond_tenant_limit")


def test_a_call_is_let_in_with_all_of_its_turns_or_not_at_all(serve_tenants: ServeTenants) -> None:
    few = serve_tenants(tenant("few", tokens_per_minute=1000, turns_at_once=3))("few")
    body = {"model": "tiny-llama", "prompt": [[5] * 10, [6] * 10], "max_tokens": 4, "ignore_eos": True}
    assert_error(few.post("/v1/completions", json={**body, "n": 2}), 400, "beyond_tenant_limit")
    assert few.get("/v1/models").headers["x-ratelimit-remaining-tokens"] == "1000"
    assert few.get("/v1/sessions").json()["data"] == []
    assert few.post("/v1/completions", json=body).status_code == 200


def test_a_stream_that_its_client_leaves_gives_back_what_it_has_not_used(serve_tenants: ServeTenants) -> None:
    few = serve_tenants(tenant("few", tokens_per_minute=2000, turns_at_once=2))("few")
    body = {"model": "tiny-llama", "prompt": [5] * 10, "max_tokens": 900, "n": 2, "ignore_eos": True, "stream": True}
    with few.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(2000 - 2 * 910)
        next(answer.iter_lines())
    wait_for(lambda: tokens_left(few) > 200)
    assert tokens_left(few) < 2000 - 10
    assert turn(few, tokens=10, max_tokens=1).status_code == 200


def test_a_paused_turn_whose_session_closes_gives_back_what_it_has_not_used(serve_tenants: ServeTenants) -> None:
    few = serve_tenants(tenant("few", tokens_per_minute=1000))("few")
    paused = few.post("/v1/sessions").json()["id"]
    few.post(f"/v1/sessions/{paused}/breakpoints", json={"layer": 0, "action": "pause"})
    few.post(f"/v1/sessions/{paused}/generate", json={"token_ids": [5] * 8, "max_tokens": 500, "ignore_eos": True})
    assert tokens_left(few) == 1000 - 508
    few.delete(f"/v1/sessions/{paused}")
    assert tokens_left(few) == 1000 - 8


def pause(http: httpx.Client, tokens: int, max_tokens: int, **asked: Any) -> str:
    """A session whose turn is paused in its first pass."""
    session: str = http.post("/v1/sessions").json()["id"]
    http.post(f"/v1/sessions/{session}/breakpoints", json={"layer": 0, "action": "pause"})
    body = {"token_ids": list(range(5, 5 + tokens)), "max_tokens": max_tokens, "ignore_eos": True}
    assert http.post(f"/v1/sessions/{session}/generate", json=body | asked).json()["status"] == "paused"
    return session


@pytest.mark.parametrize(("way", "prompt"), [("fork", 20 - 8), ("import", 20)])
def test_a_copy_of_a_paused_turn_reserves_what_is_left_of_it(
    serve_tenants: ServeTenants, way: str, prompt: int
) -> None:
    few = serve_tenants(tenant("few", tokens_per_minute=100), max_step_tokens=8, max_running=4)("few")
    paused = pause(few, tokens=20, max_tokens=20)
    file = few.get(f"/v1/sessions/{paused}/export").content

    def copy() -> httpx.Response:
        if way == "fork":
            return few.post(f"/v1/sessions/{paused}/fork")
        return few.post("/v1/sessions/import", content=file)

    assert tokens_left(few) == 100 - 40
    first = copy().json()["id"]
    assert tokens_left(few) == 60 - prompt - 20
    assert_error(copy(), 429, "rate_limit_exceeded")
    assert len(few.get("/v1/sessions").json()["data"]) == 2
    few.delete(f"/v1/sessions/{first}")
    assert tokens_left(few) == 60
    second = copy().json()["id"]
    assert few.post(f"/v1/sessions/{second}/resume", json={"until": "end"}).json()["status"] == "finished"
    assert tokens_left(few) == 60 - prompt - 20


def cancel_in_the_queue(few: httpx.Client, many: httpx.Client) -> str:
    """A session of `few` with 40 tokens of a turn that never ran, on a server that runs one turn at once."""
    for number in range(20):
        left = tokens_left(few)
        session: str = few.post("/v1/sessions").json()["id"]
        running = many.post("/v1/sessions").json()["id"]
        body = {"token_ids": [5] * 3, "max_tokens": 900, "ignore_eos": True, "stream": True}
        with many.stream("POST", f"/v1/sessions/{running}/generate", json=body) as busy:
            next(busy.iter_lines())
            tokens = list(range(5 + number, 45 + number))  # nobody has their KV
            waiting = {"token_ids": tokens, "max_tokens": 1, "ignore_eos": True, "stream": True}
            with few.stream("POST", f"/v1/sessions/{session}/generate", json=waiting):
                few.post(f"/v1/sessions/{session}/cancel")
        many.delete(f"/v1/sessions/{running}")
        if tokens_left(few) == left:
            return session
    raise AssertionError("the other turn has always ended before")


@pytest.mark.parametrize("way", ["session", "fork", "import"])
def test_tokens_of_a_turn_that_never_left_the_queue_count_with_the_next(serve_tenants: ServeTenants, way: str) -> None:
    client = serve_tenants(tenant("few", tokens_per_minute=10_000), tenant("many"), max_running=1)
    few = client("few")
    session = cancel_in_the_queue(few, client("many"))
    left = tokens_left(few)
    if way == "fork":
        session = few.post(f"/v1/sessions/{session}/fork").json()["id"]
    elif way == "import":
        file = few.get(f"/v1/sessions/{session}/export").content
        session = few.post("/v1/sessions/import", content=file).json()["id"]
    body = {"token_ids": [7], "max_tokens": 1, "ignore_eos": True}
    assert few.post(f"/v1/sessions/{session}/generate", json=body).status_code == 200
    first = left - tokens_left(few)
    assert few.post(f"/v1/sessions/{session}/generate", json=body).status_code == 200
    assert (first, left - tokens_left(few)) == (42, 44)


def test_copies_of_a_paused_turn_that_come_together_count_together(serve_tenants: ServeTenants) -> None:
    few = serve_tenants(tenant("few", turns_at_once=3))("few")
    paused = few.post("/v1/sessions").json()["id"]
    few.post(f"/v1/sessions/{paused}/breakpoints", json={"layer": 0, "action": "pause"})
    few.post(f"/v1/sessions/{paused}/generate", json={"token_ids": [5, 6], "max_tokens": 4, "ignore_eos": True})
    with ThreadPoolExecutor(8) as callers:
        forks = list(callers.map(lambda _: few.post(f"/v1/sessions/{paused}/fork").status_code, range(8)))
    assert Counter(forks) == {201: 2, 429: 6}


def test_turns_at_once(serve_tenants: ServeTenants) -> None:
    client = serve_tenants(tenant("few", turns_at_once=1), tenant("many"))
    few, many = client("few"), client("many")
    paused = few.post("/v1/sessions").json()["id"]
    few.post(f"/v1/sessions/{paused}/breakpoints", json={"layer": 0, "action": "pause"})
    few.post(f"/v1/sessions/{paused}/generate", json={"token_ids": [5, 6], "max_tokens": 4, "ignore_eos": True})
    refused = turn(few, tokens=2, max_tokens=1)
    assert_error(refused, 429, "tenant_limit")
    assert refused.headers["retry-after"] == "1"
    two = few.post("/v1/completions", json={"model": "tiny-llama", "prompt": "a", "n": 2})
    assert_error(two, 400, "beyond_tenant_limit")
    assert_error(few.post(f"/v1/sessions/{paused}/fork"), 429, "tenant_limit")
    file = few.get(f"/v1/sessions/{paused}/export").content
    assert_error(few.post("/v1/sessions/import", content=file), 429, "tenant_limit")
    assert turn(many, tokens=2, max_tokens=1).status_code == 200
    few.post(f"/v1/sessions/{paused}/cancel")
    assert turn(few, tokens=2, max_tokens=1).status_code == 200
    assert few.post("/v1/sessions/import", content=file).status_code == 201


def test_open_sessions(serve_tenants: ServeTenants) -> None:
    client = serve_tenants(tenant("few", sessions=2), tenant("many"))
    few, many = client("few"), client("many")
    first = few.post("/v1/sessions").json()["id"]
    few.post("/v1/sessions")
    refused = few.post("/v1/sessions")
    assert_error(refused, 429, "tenant_limit")
    assert refused.headers["retry-after"] == "60"
    assert_error(few.post(f"/v1/sessions/{first}/fork"), 429, "tenant_limit")
    assert many.post("/v1/sessions").status_code == 201
    few.delete(f"/v1/sessions/{first}")
    assert few.post("/v1/sessions").status_code == 201


def test_at_its_limit_a_tenant_gives_way_to_itself(serve_tenants: ServeTenants) -> None:
    client = serve_tenants(tenant("few", sessions=1), tenant("many"))
    responses = {name: [] for name in ("few", "many")}  # type: dict[str, list[str]]
    body = {"model": "tiny-llama", "input": "a", "max_output_tokens": 1}
    for name in ("many", "few", "few"):
        answer = client(name).post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        responses[name].append(answer.json()["id"])
    found = [client("few").get(f"/v1/responses/{each}").status_code for each in responses["few"]]
    assert found == [404, 200]
    assert client("many").get(f"/v1/responses/{responses['many'][0]}").status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [5] * 10, "max_tokens": 40, "n": 2}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 90}),
    ],
)
def test_a_call_that_is_refused_closes_nothing(serve_tenants: ServeTenants, path: str, fields: dict[str, Any]) -> None:
    few = serve_tenants(tenant("few", sessions=2, tokens_per_minute=100))("few")
    body = {"model": "tiny-llama", "input": "a", "max_output_tokens": 1}
    kept = [few.post("/v1/responses", json=body).json()["id"] for _ in range(2)]
    assert_error(few.post(path, json={"model": "tiny-llama", **fields}), 429, "rate_limit_exceeded")
    assert [few.get(f"/v1/responses/{each}").status_code for each in kept] == [200, 200]


@pytest.mark.parametrize("allowed", [0, 1])
def test_guaranteed_sessions(serve_tenants: ServeTenants, allowed: int) -> None:
    few = serve_tenants(tenant("few", guaranteed_sessions=allowed))("few")
    body = {"residency": "guaranteed"}
    for _ in range(allowed):
        assert few.post("/v1/sessions", json=body).status_code == 201
    assert_error(few.post("/v1/sessions", json=body), 429, "tenant_limit", param="residency")
    assert few.post("/v1/sessions").status_code == 201


def test_bytes_of_an_import(serve_tenants: ServeTenants) -> None:
    client = serve_tenants(tenant("few", import_bytes=100), tenant("many"))
    few, many = client("few"), client("many")
    session = few.post("/v1/sessions").json()["id"]
    few.post(f"/v1/sessions/{session}/generate", json={"token_ids": [5] * 20, "max_tokens": 1})
    file = few.get(f"/v1/sessions/{session}/export").content
    assert len(file) > 100
    assert_error(few.post("/v1/sessions/import", content=file), 413, "request_too_large")
    assert many.post("/v1/sessions/import", content=file).status_code == 201
