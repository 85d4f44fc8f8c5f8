from __future__ import annotations

import httpx
import pytest

from tests.conftest import ServeWith
from tests.errors import assert_error


def create(http: httpx.Client) -> str:
    session_id: str = http.post("/v1/sessions").json()["id"]
    return session_id


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


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"state": "closed"}, "state"),
        ({"tier": "tape"}, "tier"),
        ({"x": 1}, "x"),
    ],
)
def test_bad_list_parameters_are_refused(http: httpx.Client, params: dict[str, str | int], param: str) -> None:
    assert_error(http.get("/v1/sessions", params=params), 422, "field_out_of_range", param=param)


def test_a_place_in_the_list_outlives_its_session(serve_with: ServeWith) -> None:
    http = serve_with()
    created = [create(http) for _ in range(4)]
    http.delete(f"/v1/sessions/{created[1]}")
    page = http.get("/v1/sessions", params={"after": created[1]}).json()
    assert [session["id"] for session in page["data"]] == created[2:]


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
