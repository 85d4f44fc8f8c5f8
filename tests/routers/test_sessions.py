from __future__ import annotations

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
    assert session["tokens"] == 0
    assert session["kv"] == {"tier": None, "blocks": 0, "device_bytes": 0, "host_bytes": 0, "disk_bytes": 0}
    assert session["checkpoint"] is None
    assert session["metadata"] == {"task": "42"}
    assert before <= session["created_at"] <= time.time()
    assert session["expires_at"] == pytest.approx(session["created_at"] + 60, abs=1)
    assert http.get(f"/v1/sessions/{session['id']}").json() == session


def test_a_session_can_be_created_without_a_body(http: httpx.Client) -> None:
    response = http.post("/v1/sessions")
    assert response.status_code == 201
    assert response.json()["expires_at"] is None


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"ttl_s": 0}, "ttl_s", "greater than or equal to 1"),
        ({"ttl_s": "60"}, "ttl_s", "valid integer"),
        ({"ttl_s": True}, "ttl_s", "valid integer"),
        ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "at most 16"),
        ({"residency": "guaranteed"}, "residency", "memory tiers"),
        ({"color": "red"}, "color", "not permitted"),
    ],
)
def test_a_bad_field_is_named_with_its_range(
    http: httpx.Client, body: dict[str, object], param: str, says: str
) -> None:
    message = assert_error(http.post("/v1/sessions", json=body), 422, "field_out_of_range", param=param)
    assert message.startswith(param)
    assert says in message


def test_the_list_comes_in_pages_and_by_state(http: httpx.Client) -> None:
    created = [create(http) for _ in range(5)]
    seen: list[str] = []
    more = True
    while more:
        after = {"after": seen[-1]} if seen else {}
        page = http.get("/v1/sessions", params={"limit": 2, **after}).json()
        assert len(page["data"]) <= 2
        seen += [session["id"] for session in page["data"]]
        more = page["has_more"]
    assert len(set(seen)) == len(seen)
    assert set(created) <= set(seen)
    assert http.get("/v1/sessions", params={"state": "running"}).json() == {"data": [], "has_more": False}


@pytest.mark.parametrize(
    ("params", "param"),
    [({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"state": "gone"}, "state"), ({"x": 1}, "x")],
)
def test_bad_list_parameters_are_refused(http: httpx.Client, params: dict[str, str | int], param: str) -> None:
    assert_error(http.get("/v1/sessions", params=params), 422, "field_out_of_range", param=param)


def test_a_closed_session_is_gone(http: httpx.Client) -> None:
    session = create(http)
    closed = http.delete(f"/v1/sessions/{session}")
    assert closed.status_code == 204
    assert closed.content == b""
    for answer in (
        http.get(f"/v1/sessions/{session}"),
        http.delete(f"/v1/sessions/{session}"),
        http.post(f"/v1/sessions/{session}/fork"),
        http.post(f"/v1/sessions/{session}/cancel"),
        http.post(f"/v1/sessions/{session}/rewind", json={"to_token": 0}),
        http.post(f"/v1/sessions/{session}/generate", json={"prompt": "a"}),
    ):
        assert session in assert_error(answer, 404, "not_found", param="session_id")


def test_usage_and_kv_add_up_over_turns(http: httpx.Client) -> None:
    path = f"/v1/sessions/{create(http)}"
    for _ in range(2):
        http.post(f"{path}/generate", json={"token_ids": list(range(3, 23)), "max_tokens": 4, "ignore_eos": True})
    session = http.get(path).json()
    assert session["tokens"] == 48
    assert session["usage"]["prompt_tokens"] == 20 + 44
    assert session["usage"]["completion_tokens"] == 8
    assert session["usage"]["cached_tokens"] >= 23
    assert session["kv"]["tier"] == "device"
    assert session["kv"]["blocks"] == 3
    assert session["kv"]["device_bytes"] > 0


def test_fork_then_rewind_leaves_the_parent_alone(http: httpx.Client) -> None:
    parent = f"/v1/sessions/{create(http, metadata={'a': 'b'})}"
    http.post(f"{parent}/generate", json={"token_ids": [5, 6, 7], "max_tokens": 4, "ignore_eos": True})
    forked = http.post(f"{parent}/fork")
    assert forked.status_code == 201
    child = forked.json()
    assert child["tokens"] == 7
    assert child["metadata"] == {"a": "b"}
    assert child["usage"]["completion_tokens"] == 0
    rewound = http.post(f"/v1/sessions/{child['id']}/rewind", json={"to_token": 3})
    assert rewound.json()["tokens"] == 3
    assert http.get(parent).json()["tokens"] == 7


def test_rewind_past_the_end_names_the_range(http: httpx.Client) -> None:
    response = http.post(f"/v1/sessions/{create(http)}/rewind", json={"to_token": 1})
    assert "from 0 to 0" in assert_error(response, 422, "field_out_of_range", param="to_token")


def test_there_is_nothing_to_cancel_in_an_idle_session(http: httpx.Client) -> None:
    response = http.post(f"/v1/sessions/{create(http)}/cancel")
    assert "is idle" in assert_error(response, 409, "wrong_state")


def test_sessions_belong_to_the_key_that_made_them(serve_with: ServeWith) -> None:
    http = serve_with(api_keys=("one", "two"))
    mine, yours = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
    session = http.post("/v1/sessions", headers=mine).json()["id"]
    path = f"/v1/sessions/{session}"
    assert http.get(path, headers=mine).status_code == 200
    assert_error(http.get(path, headers=yours), 404, "not_found", param="session_id")
    assert_error(http.delete(path, headers=yours), 404, "not_found", param="session_id")
    assert http.get("/v1/sessions", headers=yours).json()["data"] == []
    assert len(http.get("/v1/sessions", headers=mine).json()["data"]) == 1


def test_too_many_sessions_are_told_when_to_come_back(serve_with: ServeWith) -> None:
    http = serve_with(max_sessions=1)
    session = create(http)
    for refused in (http.post("/v1/sessions"), http.post(f"/v1/sessions/{session}/fork")):
        assert_error(refused, 429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
    http.delete(f"/v1/sessions/{session}")
    create(http)
