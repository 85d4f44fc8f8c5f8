"""Responses that the server has kept: read, listed, cancelled, deleted, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference
from tests.openai.responses.asking import GREEDY, LONG
from tests.serving import serve


def test_a_response_can_be_read_again(sdk: openai.OpenAI, http: httpx.Client) -> None:
    made = sdk.responses.create(**GREEDY, input="Hello", instructions="Be brief.", user="Ada")
    assert sdk.responses.retrieve(made.id) == made
    streamed = http.get(f"/v1/responses/{made.id}", params={"stream": "true"})
    assert_error(streamed, 400, "field_out_of_range", param="stream")


def test_the_input_comes_in_pages(sdk: openai.OpenAI, http: httpx.Client) -> None:
    items: Any = [{"role": "user", "content": f"Number {number}"} for number in range(5)]
    made = sdk.responses.create(**GREEDY, input=items)

    def texts(**query: Any) -> list[str]:
        listed: Any = sdk.responses.input_items.list(made.id, **query)
        return [item.content[0].text for item in listed]

    in_order = [f"Number {number}" for number in range(5)]
    assert texts(order="asc") == in_order
    assert texts() == in_order[::-1]
    assert texts(order="asc", limit=2) == in_order  # the SDK reads page after page
    first = http.get(f"/v1/responses/{made.id}/input_items", params={"order": "asc", "limit": 2}).json()
    assert (len(first["data"]), first["has_more"], first["object"]) == (2, True, "list")
    assert first["last_id"] == first["data"][-1]["id"]
    wrong = http.get(f"/v1/responses/{made.id}/input_items", params={"after": "msg_0"})
    assert_error(wrong, 400, "field_out_of_range", param="after")


def test_a_deleted_response_is_gone_but_not_for_those_after_it(sdk: openai.OpenAI, http: httpx.Client) -> None:
    first = sdk.responses.create(**GREEDY, input="One")
    second = sdk.responses.create(**GREEDY, input="Two", previous_response_id=first.id)
    expected = sdk.responses.create(**GREEDY, input="Three", previous_response_id=second.id, store=False)
    assert http.delete(f"/v1/responses/{first.id}").json() == {"id": first.id, "object": "response", "deleted": True}
    for answer in (http.get(f"/v1/responses/{first.id}"), http.delete(f"/v1/responses/{first.id}")):
        assert_error(answer, 404, "not_found", param="response_id")
    with pytest.raises(openai.NotFoundError):
        sdk.responses.create(**GREEDY, input="x", previous_response_id=first.id)
    third = sdk.responses.create(**GREEDY, input="Three", previous_response_id=second.id)
    assert third.output_text == expected.output_text


def test_the_session_goes_with_the_last_response(sdk: openai.OpenAI, http: httpx.Client) -> None:
    raw = sdk.responses.with_raw_response.create(**GREEDY, input="One")
    session = f"/v1/sessions/{raw.headers['x-session-id']}"
    assert http.get(session).status_code == 200
    sdk.responses.delete(raw.parse().id)
    assert http.get(session).status_code == 404


def test_a_running_response_can_be_cancelled(sdk: openai.OpenAI, http: httpx.Client) -> None:
    before = sdk.responses.create(**GREEDY, input="One")
    with sdk.responses.create(**LONG, previous_response_id=before.id, stream=True) as stream:
        created: Any = next(iter(stream))
        running = created.response.id
        assert sdk.responses.retrieve(running).status == "in_progress"
        refused = http.delete(f"/v1/responses/{running}")
        assert "cancel" in assert_error(refused, 400, "malformed_request", param="response_id")
        assert sdk.responses.cancel(running).status == "cancelled"
        last: Any = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert sdk.responses.retrieve(running).status == "cancelled"
    again = http.post(f"/v1/responses/{running}/cancel")
    assert "cancelled" in assert_error(again, 400, "malformed_request", param="response_id")
    with pytest.raises(openai.BadRequestError, match="cannot be continued"):
        sdk.responses.create(**GREEDY, input="x", previous_response_id=running)
    assert sdk.responses.create(**GREEDY, input="Two", previous_response_id=before.id).status == "incomplete"


def test_a_running_response_cannot_be_continued(sdk: openai.OpenAI, http: httpx.Client) -> None:
    with sdk.responses.create(**LONG, stream=True) as stream:
        created: Any = next(iter(stream))
        running = created.response.id
        body = {"model": MODEL, "input": "x", "previous_response_id": running}
        for store in (True, False):
            refused = http.post("/v1/responses", json={**body, "store": store})
            message = assert_error(refused, 400, "field_out_of_range", param="previous_response_id")
            assert "in_progress" in message
        assert sdk.responses.retrieve(running).status == "in_progress"


def test_a_client_that_goes_away_cancels_its_response(sdk: openai.OpenAI) -> None:
    with sdk.responses.create(**LONG, stream=True) as stream:
        created: Any = next(iter(stream))
    for _ in range(500):
        if (status := sdk.responses.retrieve(created.response.id).status) != "in_progress":
            break
    assert status == "cancelled"


def test_only_a_running_response_can_be_cancelled(sdk: openai.OpenAI) -> None:
    made = sdk.responses.create(**GREEDY, input="One")
    with pytest.raises(openai.BadRequestError, match="incomplete"):
        sdk.responses.cancel(made.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.cancel("resp_0")


@pytest.fixture(scope="module")
def guarded(reference: Reference) -> Iterator[str]:
    """A server for two owners that keeps four responses."""
    with serve(model=str(reference.folder), api_keys=("ours", "theirs"), max_responses=4) as url:
        yield f"{url}/v1"


def client(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)


def test_owners_never_see_each_others_responses(guarded: str) -> None:
    with client(guarded, "ours") as ours, client(guarded, "theirs") as theirs:
        made = ours.responses.create(**GREEDY, input="Secret")
        assert ours.responses.retrieve(made.id) == made
        reference: Any = [{"type": "item_reference", "id": made.output[0].id}]
        asked: Any = {"model": MODEL, "input": "x"}
        for attempt in (
            lambda: theirs.responses.retrieve(made.id),
            lambda: theirs.responses.delete(made.id),
            lambda: theirs.responses.cancel(made.id),
            lambda: theirs.responses.input_items.list(made.id),
            lambda: theirs.responses.create(**asked, previous_response_id=made.id),
            lambda: theirs.responses.create(**{**asked, "input": reference}),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        assert ours.responses.retrieve(made.id) == made


def test_the_conversations_unused_for_longest_give_way_with_their_sessions(guarded: str) -> None:
    with client(guarded, "ours") as sdk, httpx.Client(headers={"Authorization": "Bearer ours"}) as http:
        first = sdk.responses.create(**GREEDY, input="First")
        others = [sdk.responses.create(**GREEDY, input=f"Number {number}") for number in range(3)]
        sdk.responses.create(**GREEDY, input="Again", previous_response_id=first.id)
        assert sdk.responses.retrieve(first.id).id == first.id
        with pytest.raises(openai.NotFoundError):
            sdk.responses.retrieve(others[0].id)
        assert sdk.responses.retrieve(others[2].id).id == others[2].id
        assert len(http.get(f"{guarded}/sessions").json()["data"]) <= 4


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_owner_pushes_out_its_own_responses_and_nobody_elses(guarded: str, goes_on: bool) -> None:
    with client(guarded, "ours") as ours, client(guarded, "theirs") as theirs:
        kept = theirs.responses.create(**GREEDY, input="Theirs")
        last = ours.responses.create(**GREEDY, input="First")
        for number in range(5):
            previous: Any = {"previous_response_id": last.id} if goes_on else {}
            last = ours.responses.create(**GREEDY, input=f"Number {number}", **previous)
        assert theirs.responses.retrieve(kept.id) == kept
        assert ours.responses.retrieve(last.id) == last


@pytest.fixture(scope="module")
def narrow(reference: Reference) -> Iterator[str]:
    """A server for two owners whose responses have room for 32 KiB."""
    keys = ("ours", "theirs")
    with serve(model=str(reference.folder), api_keys=keys, max_responses_bytes=32 << 10) as url:
        yield f"{url}/v1"


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_owner_of_large_responses_pushes_out_its_own(narrow: str, goes_on: bool) -> None:
    large: Any = {**GREEDY, "metadata": {f"label {number}": "x" * 500 for number in range(12)}}
    with client(narrow, "ours") as ours, client(narrow, "theirs") as theirs:
        kept = theirs.responses.create(**GREEDY, input="Theirs")
        made = [ours.responses.create(**large, input="Number 0")]
        for number in range(1, 8):
            previous: Any = {"previous_response_id": made[-1].id} if goes_on and found(ours, made[-1].id) else {}
            made.append(ours.responses.create(**large, input=f"Number {number}", **previous))
        assert theirs.responses.retrieve(kept.id) == kept
        left = [each.id for each in made if found(ours, each.id)]
        assert 0 < len(left) <= 6
        assert left == [each.id for each in made[-len(left) :]]


def found(sdk: openai.OpenAI, response_id: str) -> bool:
    try:
        return sdk.responses.retrieve(response_id).id == response_id
    except openai.NotFoundError:
        return False
