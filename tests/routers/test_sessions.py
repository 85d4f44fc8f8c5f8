"""Sessions over HTTP."""

import time

import httpx
import pytest

from tests.conftest import ServeWith
from tests.errors import assert_error


def create(http: httpx.Client, **fields: object) -> str:
    response = http.post("/v1/sessions", json=fields)
    assert response.status_code == 201, response.text
    session_id: str = response.json()["id"]
    return session_id


def test_a_new_session_is_idle_and_empty(http: httpx.Client) -> None:
    before = time.time()
    response = http.post("/v1/sessions", json={"metadata": {"task": "42"}, "ttl_s": 60})
    assert response.status_code == 201
    session = response.json()
    assert session["state"] == "idle"
    assert session["phase"] == "compute"
    assert session["residency"] == "best_effort"
    assert session["tokens"] == 0
    assert session["kv"] == {"tier": None, "blocks": 0, "device_bytes": 0, "host_bytes": 0, "disk_bytes": 0}
    assert {session[name] for name in ("returns_at", "checkpoint", "forked_from")} == {None}
    assert session["usage"]["last_turn"] is None
    assert session["metadata"] == {"task": "42"}
    assert before <= session["created_at"] <= session["used_at"] <= time.time()
    assert session["expires_at"] == pytest.approx(session["created_at"] + 60, abs=1)
    assert http.get(f"/v1/sessions/{session['id']}").json() == session
    without_a_body = http.post("/v1/sessions").json()
    assert without_a_body["expires_at"] == pytest.approx(time.time() + 30 * 24 * 3600, abs=10)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"ttl_s": True}, "ttl_s", "an integer from 1 to 2592000; got true"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "at most 16 fields; got an object of 17"),
        ({"metadata": {"": "x"}}, "metadata", "its name: a string of 1 to 64 characters"),
    ],
)
def test_a_bad_field_is_named(http: httpx.Client, body: dict[str, object], param: str, says: str) -> None:
    message = assert_error(http.post("/v1/sessions", json=body), 422, "field_out_of_range", param=param)
    assert message.startswith(param)
    assert says in message


def test_guaranteed_sessions_beyond_the_reserve_are_told_when_to_come_back(serve_with: ServeWith) -> None:
    """The device has room for four full contexts."""
    http, asked = serve_with(), {"residency": "guaranteed"}
    while (answer := http.post("/v1/sessions", json=asked)).status_code == 201:
        session = answer.json()
    assert session["residency"] == "guaranteed"
    assert_error(answer, 429, "queue_full", param="residency")
    assert int(answer.headers["retry-after"]) >= 1
    assert 1 <= len(http.get("/v1/sessions").json()["data"]) <= 4
    assert create(http)
    http.delete(f"/v1/sessions/{session['id']}")
    assert http.post("/v1/sessions", json=asked).status_code == 201


def test_a_device_too_small_for_any_guarantee_says_so(serve_with: ServeWith) -> None:
    answer = serve_with(kv_device="1x64").post("/v1/sessions", json={"residency": "guaranteed"})
    message = assert_error(answer, 422, "field_out_of_range", param="residency")
    assert "not two contexts of 64" in message
    assert "retry-after" not in answer.headers


def test_a_turn_is_a_use_and_a_signal_is_none(http: httpx.Client) -> None:
    session = f"/v1/sessions/{create(http)}"
    opened = http.get(session).json()
    http.post(f"{session}/generate", json={"token_ids": [5, 6], "max_tokens": 1})
    used = http.get(session).json()
    assert opened["used_at"] < used["used_at"] <= time.time()
    http.post(f"{session}/phase", json={"phase": "idle"})
    assert http.get(session).json()["used_at"] == used["used_at"]


def test_usage_and_kv_add_up_over_turns(http: httpx.Client) -> None:
    path = f"/v1/sessions/{create(http)}"
    for _ in range(2):
        http.post(f"{path}/generate", json={"token_ids": list(range(3, 23)), "max_tokens": 4, "ignore_eos": True})
    session = http.get(path).json()
    assert session["tokens"] == 48
    assert session["usage"]["prompt_tokens"] == 20 + 44
    assert session["usage"]["completion_tokens"] == 8
    assert session["usage"]["cached_tokens"] >= 23
    last = session["usage"]["last_turn"]
    assert (last["prompt_tokens"], last["completion_tokens"], last["tokens_recomputed"]) == (44, 4, 0)
    assert 23 <= last["cached_tokens"] < 44
    assert session["kv"]["tier"] == "device"
    assert session["kv"]["blocks"] == 3
    assert session["kv"]["device_bytes"] > 0


def test_the_history_can_be_read_back(http: httpx.Client) -> None:
    path = f"/v1/sessions/{create(http)}"
    assert http.get(f"{path}/history").json() == {"tokens": 0, "token_ids": [], "text": "", "pieces": None}
    asked = {"messages": [{"role": "user", "content": "Grüße"}], "max_tokens": 8, "ignore_eos": True}
    turn = http.post(f"{path}/generate", json=asked).json()
    history = http.get(f"{path}/history").json()
    prompt = http.post("/tokenize", json={"messages": asked["messages"]}).json()["tokens"]
    assert history["token_ids"] == prompt + turn["token_ids"]
    assert history["tokens"] == len(history["token_ids"]) == http.get(path).json()["tokens"]
    assert history["text"].startswith("<|im_start|>user\nGrüße<|im_end|>\n<|im_start|>assistant\n")
    assert history["pieces"] is None
    pieces = http.get(f"{path}/history", params={"pieces": True}).json()
    assert (pieces["token_ids"], pieces["text"]) == (history["token_ids"], history["text"])
    assert len(pieces["pieces"]) == history["tokens"]
    assert "".join(pieces["pieces"]) == history["text"]
    for start in range(history["tokens"] + 2):
        later = http.get(f"{path}/history", params={"pieces": True, "start": start}).json()
        assert (later["token_ids"], later["pieces"]) == (pieces["token_ids"][start:], pieces["pieces"][start:])
    http.post(f"{path}/rewind", json={"to_token": 3})
    assert http.get(f"{path}/history").json()["token_ids"] == prompt[:3]


def unnamed_call(http: httpx.Client, prompt: str) -> str:
    """The session of a call that names none."""
    answer = http.post("/v1/completions", json={"model": "tiny-llama", "prompt": prompt, "max_tokens": 1})
    return answer.raise_for_status().headers["x-session-id"]


def test_a_session_never_gives_way_to_its_own_fork(serve_with: ServeWith) -> None:
    http = serve_with(max_sessions=2, bind_by_prefix=True)
    parent, younger = unnamed_call(http, "One"), unnamed_call(http, "Two")
    child = http.post(f"/v1/sessions/{parent}/fork").raise_for_status().json()["id"]
    assert [http.get(f"/v1/sessions/{each}").status_code for each in (parent, younger)] == [200, 404]
    other = http.post(f"/v1/sessions/{child}/fork").raise_for_status().json()["id"]
    assert [http.get(f"/v1/sessions/{each}").status_code for each in (parent, child, other)] == [404, 200, 200]


def test_the_list_by_tier_is_in_pages_however_few_are_there(serve_with: ServeWith) -> None:
    http = serve_with()
    created = [create(http) for _ in range(9)]
    used = [created[place] for place in (1, 2, 6, 8)]
    for session in used:
        http.post(f"/v1/sessions/{session}/generate", json={"token_ids": [5, 6], "max_tokens": 1})
    first = http.get("/v1/sessions", params={"tier": "device", "limit": 3}).json()
    assert [session["id"] for session in first["data"]] == used[:3]
    assert first["has_more"]
    last = http.get("/v1/sessions", params={"tier": "device", "limit": 3, "after": used[2]}).json()
    assert [session["id"] for session in last["data"]] == used[3:]
    assert not last["has_more"]
    for none in ({"tier": "disk"}, {"state": "running"}):
        assert http.get("/v1/sessions", params=none).json() == {"data": [], "has_more": False}
    every = http.get("/v1/sessions", params={"limit": 9}).json()
    assert [session["id"] for session in every["data"]] == created
    assert not every["has_more"]


def test_a_place_that_is_nobodys_and_one_of_another_owner_are_refused_alike(serve_with: ServeWith) -> None:
    http = serve_with(api_keys=("one", "two"))
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    open_one, closed_one = (http.post("/v1/sessions", headers=one).json()["id"] for _ in range(2))
    http.delete(f"/v1/sessions/{closed_one}", headers=one)
    for after in (open_one, closed_one, "ses_0", open_one[:-1], "x", ""):
        response = http.get("/v1/sessions", params={"after": after}, headers=two)
        message = assert_error(response, 422, "field_out_of_range", param="after")
        place = "the id of an open session, or of one of the last 4096 that closed"
        assert message == f"after must be {place}; got '{after}'"
    assert http.get("/v1/sessions", params={"after": closed_one}, headers=one).status_code == 200


def test_only_so_many_closed_sessions_keep_their_place(serve_with: ServeWith) -> None:
    http = serve_with(max_sessions=2)
    gone = []
    for _ in range(3):
        gone.append(create(http))
        http.delete(f"/v1/sessions/{gone[-1]}")
    statuses = [http.get("/v1/sessions", params={"after": session}).status_code for session in gone]
    assert statuses == [422, 200, 200]
