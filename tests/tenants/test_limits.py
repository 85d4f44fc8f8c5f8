"""A tenant's own limits, on a clock of the test's, and the places that its sessions leave to others."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from app.domain.homes import new_session_id
from app.sessions.session import UNNAMED, Session
from app.sessions.table import SessionTable
from app.tenants.tenancy import Tenancy
from tests.errors import assert_error, assert_messages_error
from tests.serving import serve, tiny_settings
from tests.tenants.conftest import ServeTenants
from tests.tenants.tenant_files import Clock, tenant, turn, write_tenants
from tests.waiting import wait_until

ClientOf = Callable[[str], httpx.Client]
TENANTS: dict[str, Any] = {
    "many": {},
    "two-requests": {"requests_per_minute": 2},
    "one-request": {"requests_per_minute": 1},
    **{f"100-tokens-{use}": {"tokens_per_minute": 100} for use in ("come-back", "cached", "refused", "fork", "import")},
    "50-tokens": {"tokens_per_minute": 50},
    "three-turns": {"tokens_per_minute": 1000, "turns_at_once": 3},
    "two-streams": {"tokens_per_minute": 2000, "turns_at_once": 2},
    "1000-tokens": {"tokens_per_minute": 1000},
    "one-turn": {"turns_at_once": 1},
    "two-sessions": {"sessions": 2},
    "one-session": {"sessions": 1},
    "kept": {"sessions": 2, "tokens_per_minute": 100},
    "batches": {"sessions": 2},
    "no-guarantee": {"guaranteed_sessions": 0},
    "one-guarantee": {"guaranteed_sessions": 1},
    "small-files": {"import_bytes": 100},
}


@pytest.fixture(scope="module")
def shared_clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, shared_clock: Clock) -> Iterator[ClientOf]:
    """Clients of the tenants. The server computes prompts in parts of 8 tokens."""
    everybody = [tenant(name, **limits) for name, limits in TENANTS.items()]
    file = write_tenants(tmp_path_factory.mktemp("tenants") / "tenants.json", *everybody)
    with serve(clock=shared_clock, tenants=file, max_step_tokens=8, max_running=4) as url, ExitStack() as ends:
        yield lambda name: ends.enter_context(httpx.Client(base_url=url, timeout=30, headers={"X-Api-Key": name}))


def test_batches_and_embeddings_take_the_room_that_there_is(client: ClientOf) -> None:
    few, asked = client("batches"), {"model": "tiny-llama", "max_tokens": 2}
    idle = few.post("/v1/chat/completions", json={**asked, "messages": [{"role": "user", "content": "Hi"}]})
    at = f"/v1/sessions/{idle.headers['x-session-id']}"
    vectors = few.post("/v1/embeddings", json={"model": "tiny-llama", "input": list("abcdefgh")})
    assert (len(vectors.json()["data"]), few.get(at).status_code) == (8, 200)
    held = [few.post("/v1/sessions").json()["id"] for _ in range(2)]
    line = {"method": "POST", "url": "/v1/completions", "body": {**asked, "prompt": "Once"}}
    content = "\n".join(json.dumps({**line, "custom_id": str(number)}) for number in range(9))
    file = few.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()["id"]
    about = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = few.post("/v1/batches", json=about).json()["id"]
    wait_until(lambda: few.get(f"/v1/batches/{batch}").json()["status"] == "in_progress")
    time.sleep(0.3)
    few.delete(f"/v1/sessions/{held[0]}").raise_for_status()
    # Not after Retry-After, a minute.
    wait_until(lambda: few.get(f"/v1/batches/{batch}").json()["request_counts"]["completed"] == 9, 45)


def tokens_left(http: httpx.Client) -> int:
    return int(http.get("/v1/models").headers["x-ratelimit-remaining-tokens"])


def pause(http: httpx.Client, tokens: int, max_tokens: int, **asked: Any) -> str:
    """A session whose turn is paused in its first pass."""
    session: str = http.post("/v1/sessions").json()["id"]
    http.post(f"/v1/sessions/{session}/breakpoints", json={"layer": 0, "action": "pause"})
    body = {"token_ids": list(range(5, 5 + tokens)), "max_tokens": max_tokens, "ignore_eos": True}
    assert http.post(f"/v1/sessions/{session}/generate", json=body | asked).json()["status"] == "paused"
    return session


def test_requests_of_a_minute(client: ClientOf, shared_clock: Clock) -> None:
    few, many = client("two-requests"), client("many")
    first = few.get("/v1/models")
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "1m0s"
    shared_clock.now += 20.5
    assert few.get("/v1/models").headers["x-ratelimit-remaining-requests"] == "0"
    refused = few.get("/v1/models")
    assert_error(refused, 429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "40"
    assert refused.headers["x-ratelimit-reset-requests"] == "39.5s"
    assert many.get("/v1/models").status_code == 200
    assert "x-ratelimit-limit-requests" not in many.get("/v1/models").headers
    shared_clock.now += int(refused.headers["retry-after"])
    assert few.get("/v1/models").status_code == 200


def connect_responses(http: httpx.Client, api_key: str) -> ClientConnection:
    url = str(http.base_url).replace("http", "ws")
    return connect(f"{url}/v1/responses", additional_headers={"X-Api-Key": api_key})


def test_each_dialect_has_its_own_refusal(client: ClientOf) -> None:
    few = client("one-request")
    few.get("/v1/models")
    chat = few.post("/v1/chat/completions", json={"model": "tiny-llama", "messages": []})
    assert_error(chat, 429, "rate_limit_exceeded")
    message = few.post("/v1/messages", json={"model": "tiny-llama", "max_tokens": 1, "messages": []})
    assert_messages_error(message, 429)
    assert chat.json()["error"]["type"] == message.json()["error"]["type"] == "rate_limit_error"
    response = few.post("/v1/responses", json={"model": "tiny-llama", "input": "a"})
    assert_error(response, 429, "rate_limit_exceeded")
    with pytest.raises(InvalidStatus) as refused, connect_responses(few, "one-request"):
        pass
    assert refused.value.response.status_code == 429
    assert int(refused.value.response.headers["retry-after"]) >= 1
    for answer in (chat, message, response):
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"


def test_reserved_tokens_that_were_not_used_come_back_when_turn_or_session_end(client: ClientOf) -> None:
    few = client("100-tokens-come-back")
    paused = pause(few, tokens=10, max_tokens=50, stop_token_ids=list(range(64)))
    assert tokens_left(few) == 100 - 10 - 50
    answer = few.post(f"/v1/sessions/{paused}/resume", json={"until": "end"}).json()
    used = answer["usage"]["completion_tokens"]
    assert used < 50
    assert tokens_left(few) == 100 - 10 - used
    few = client("1000-tokens")
    paused = pause(few, tokens=8, max_tokens=500)
    assert tokens_left(few) == 1000 - 508
    few.delete(f"/v1/sessions/{paused}")
    assert tokens_left(few) == 1000 - 8


def test_tokens_that_the_server_still_has_do_not_count(client: ClientOf) -> None:
    few = client("100-tokens-cached")
    session = few.post("/v1/sessions").json()["id"]
    for _ in range(2):
        body = {"token_ids": [5] * 20, "max_tokens": 2, "ignore_eos": True}
        assert few.post(f"/v1/sessions/{session}/generate", json=body).status_code == 200
    assert tokens_left(few) == 100 - (20 + 2) - (1 + 20 + 2 - 1)
    refused = few.post(f"/v1/sessions/{session}/generate", json={"token_ids": [9999], "max_tokens": 5})
    assert_error(refused, 422, "field_out_of_range", param="token_ids")
    assert tokens_left(few) == 56, "what is refused costs nothing"


def test_tokens_of_a_minute(client: ClientOf, shared_clock: Clock) -> None:
    few, many = client("100-tokens-refused"), client("many")
    assert turn(few, tokens=80, max_tokens=1).status_code == 200
    refused = turn(few, tokens=20, max_tokens=1)
    message = assert_error(refused, 429, "rate_limit_exceeded")
    assert "100 tokens in a minute, and 19 are left; this call needs 21" in message
    assert refused.headers["retry-after"] == "60"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "19"
    assert turn(many, tokens=80, max_tokens=1).status_code == 200
    less = client("50-tokens")
    assert turn(less, tokens=1, max_tokens=1).status_code == 200
    assert_error(turn(less, tokens=80, max_tokens=1), 429, "rate_limit_exceeded")
    shared_clock.now += 60
    assert turn(few, tokens=20, max_tokens=1).status_code == 200
    assert turn(less, tokens=80, max_tokens=1).status_code == 200, "more than a minute's: a new one is for it alone"
    assert tokens_left(less) == 0


def test_a_call_is_let_in_with_all_of_its_turns_or_not_at_all(client: ClientOf) -> None:
    few = client("three-turns")
    body = {"model": "tiny-llama", "prompt": [[5] * 10, [6] * 10], "max_tokens": 4, "ignore_eos": True}
    assert_error(few.post("/v1/completions", json={**body, "n": 2}), 400, "beyond_tenant_limit")
    assert tokens_left(few) == 1000
    assert few.get("/v1/sessions").json()["data"] == []
    assert few.post("/v1/completions", json=body).status_code == 200
    left = tokens_left(few)
    assert few.post("/v1/completions", json={**body, "prompt": [7] * 10, "n": 3}).status_code == 200
    used = left - tokens_left(few)
    assert 10 + 3 * 4 <= used <= 3 * (10 + 4), "the other choices may find the prompt's KV"


def test_a_stream_that_its_client_leaves_gives_back_what_it_has_not_used(client: ClientOf) -> None:
    few = client("two-streams")
    body = {"model": "tiny-llama", "prompt": [5] * 10, "max_tokens": 900, "n": 2, "ignore_eos": True, "stream": True}
    with few.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(2000 - 2 * 910)
        next(answer.iter_lines())
    wait_until(lambda: tokens_left(few) > 200)
    assert tokens_left(few) < 2000 - 10


@pytest.mark.parametrize(("way", "prompt"), [("fork", 20 - 8), ("import", 20)])
def test_a_copy_of_a_paused_turn_reserves_what_is_left_of_it(client: ClientOf, way: str, prompt: int) -> None:
    few = client(f"100-tokens-{way}")
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


def test_turns_at_once(client: ClientOf) -> None:
    few, many = client("one-turn"), client("many")
    paused = pause(few, tokens=2, max_tokens=4)
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
    three = client("three-turns")
    paused = pause(three, tokens=2, max_tokens=4)
    with ThreadPoolExecutor(8) as callers:
        forks = list(callers.map(lambda _: three.post(f"/v1/sessions/{paused}/fork").status_code, range(8)))
    assert Counter(forks) == {201: 2, 429: 6}, "copies that come together count together"


def test_open_sessions(client: ClientOf) -> None:
    few, many = client("two-sessions"), client("many")
    first = few.post("/v1/sessions").json()["id"]
    few.post("/v1/sessions")
    refused = few.post("/v1/sessions")
    assert_error(refused, 429, "tenant_limit")
    assert refused.headers["retry-after"] == "60"
    assert_error(few.post(f"/v1/sessions/{first}/fork"), 429, "tenant_limit")
    assert many.post("/v1/sessions").status_code == 201
    few.delete(f"/v1/sessions/{first}")
    assert few.post("/v1/sessions").status_code == 201


def test_at_its_limit_a_tenant_gives_way_to_itself_but_for_a_call_that_is_refused(client: ClientOf) -> None:
    few, many, kept = client("one-session"), client("many"), client("kept")
    body = {"model": "tiny-llama", "input": "a", "max_output_tokens": 1}
    callers = (many, few, few, kept, kept)
    made = [http.post("/v1/responses", json=body).raise_for_status().json()["id"] for http in callers]
    for path, fields in (
        ("/v1/completions", {"prompt": [5] * 10, "max_tokens": 40, "n": 2}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 90}),
    ):
        assert_error(kept.post(path, json={"model": "tiny-llama", **fields}), 429, "rate_limit_exceeded")
    found = [http.get(f"/v1/responses/{each}").status_code for http, each in zip(callers, made, strict=True)]
    assert found == [200, 404, 200, 200, 200]


def test_guaranteed_sessions(client: ClientOf) -> None:
    few, none = client("one-guarantee"), client("no-guarantee")
    body = {"residency": "guaranteed"}
    assert few.post("/v1/sessions", json=body).status_code == 201
    for each in (few, none):
        assert_error(each.post("/v1/sessions", json=body), 429, "tenant_limit", param="residency")
        assert each.post("/v1/sessions").status_code == 201


def test_bytes_of_an_import(client: ClientOf) -> None:
    few, many = client("small-files"), client("many")
    session = few.post("/v1/sessions").json()["id"]
    few.post(f"/v1/sessions/{session}/generate", json={"token_ids": [5] * 20, "max_tokens": 1})
    file = few.get(f"/v1/sessions/{session}/export").content
    assert len(file) > 100
    assert_error(few.post("/v1/sessions/import", content=file), 413, "request_too_large")
    assert many.post("/v1/sessions/import", content=file).status_code == 201


def test_bytes_of_kv_of_turns_under_way(serve_tenants: ServeTenants, http: httpx.Client) -> None:
    per_token = kv_of_64(http) // 64
    limited = [tenant(name, device_bytes=40 * per_token) for name in ("few", "one")]
    client = serve_tenants(*limited, tenant("many"))
    few, many, one = map(client, ("few", "many", "one"))
    paused = pause(few, tokens=20, max_tokens=4)
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
    path = f"/v1/sessions/{one.post('/v1/sessions').json()['id']}/generate"
    assert one.post(path, json={"token_ids": [5] * 30, "max_tokens": 4, "ignore_eos": True}).status_code == 200
    refused = one.post(path, json={"token_ids": [5] * 7, "max_tokens": 1})
    message = assert_error(refused, 422, "beyond_tenant_limit")  # it would be in vain to come again
    assert f"this call alone needs {41 * per_token}" in message, "with what the session has"
    assert "retry-after" not in refused.headers
    assert one.post(path, json={"token_ids": [5] * 6, "max_tokens": 1}).status_code == 200


def test_bytes_in_host_memory(serve_tenants: ServeTenants, http: httpx.Client) -> None:
    one = kv_of_64(http)
    client = serve_tenants(tenant("few", host_bytes=2 * one), tenant("many"), kv_host=64 << 20)
    sessions = {name: [parked(client(name), number) for number in range(4)] for name in ("few", "many")}
    wait_until(lambda: sum(host_bytes(client("few"), each) for each in sessions["few"]) <= 2 * one)
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
    wait_until(lambda: host_bytes(http, session) > 0)
    return session


def host_bytes(http: httpx.Client, session: str) -> int:
    return int(http.get(f"/v1/sessions/{session}").json()["kv"]["host_bytes"])


# Places that a tenant's sessions leave to others.


def open_all(http: httpx.Client) -> tuple[int, httpx.Response]:
    """How many sessions the tenant can open, and the refusal of the next."""
    opened = 0
    while (answer := http.post("/v1/sessions")).status_code == 201:
        opened += 1
    return opened, answer


def test_a_tenant_that_opens_sessions_without_end_leaves_some_to_another(serve_tenants: ServeTenants) -> None:
    client = serve_tenants(tenant("greedy"), tenant("quiet"), max_sessions=18)
    opened, refusal = open_all(client("greedy"))
    assert opened == 16
    assert "this tenant has 16 of the 18 sessions" in assert_error(refusal, 429, "session_limit")
    assert open_all(client("quiet"))[0] == 2


def table_of(places: int) -> SessionTable:
    return SessionTable(places, Tenancy(tiny_settings(), lambda: 0.0).quotas)


def fill(table: SessionTable, **held: int) -> None:
    """Idle sessions that unnamed calls have opened: they give way."""
    for owner, count in held.items():
        for _ in range(count):
            table.add(Session(new_session_id(), owner, name=UNNAMED))


def test_a_tenant_without_sessions_gets_a_place_of_one_that_gives_way_and_no_more_give_way_than_open() -> None:
    table = table_of(100)
    fill(table, b=89, c=10, d=1)
    assert len(table.giving_way("e", 1)) == 1
    table = table_of(100)
    fill(table, b=89)
    for _ in range(10):
        table.add(Session(new_session_id(), "c"))
    assert [session.owner for session in table.giving_way("b", 1)] == ["b"]
