"""Responses that the server has kept: read, listed, cancelled, deleted, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference
from tests.openai.responses.asking import GREEDY, LONG
from tests.serving import serve


def test_a_response_can_be_read_again_until_it_is_deleted_with_its_session(sdk: Any, http: httpx.Client) -> None:
    raw = sdk.responses.with_raw_response.create(**GREEDY, input="Hello", instructions="Be brief.", user="Ada")
    made, session = raw.parse(), f"/v1/sessions/{raw.headers['x-session-id']}"
    assert sdk.responses.retrieve(made.id) == made
    streamed = http.get(f"/v1/responses/{made.id}", params={"stream": "true"})
    assert_error(streamed, 400, "field_out_of_range", param="stream")
    with pytest.raises(openai.BadRequestError, match="incomplete"):
        sdk.responses.cancel(made.id)
    assert http.get(session).status_code == 200
    sdk.responses.delete(made.id)
    assert http.get(session).status_code == 404
    with pytest.raises(openai.NotFoundError):
        sdk.responses.cancel(made.id)


def test_the_input_comes_in_pages(sdk: Any, http: httpx.Client) -> None:
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


def test_a_deleted_response_is_gone_but_not_for_those_after_it(sdk: Any, http: httpx.Client) -> None:
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


def test_a_running_response_can_be_cancelled(sdk: Any, http: httpx.Client) -> None:
    before = sdk.responses.create(**GREEDY, input="One")
    with sdk.responses.create(**LONG, previous_response_id=before.id, stream=True) as stream:
        running = next(iter(stream)).response.id
        assert sdk.responses.retrieve(running).status == "in_progress"
        refused = http.delete(f"/v1/responses/{running}")
        assert "cancel" in assert_error(refused, 400, "malformed_request", param="response_id")
        assert sdk.responses.cancel(running).status == "cancelled"
        last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert sdk.responses.retrieve(running).status == "cancelled"
    again = http.post(f"/v1/responses/{running}/cancel")
    assert "cancelled" in assert_error(again, 400, "malformed_request", param="response_id")
    with pytest.raises(openai.BadRequestError, match="cannot be continued"):
        sdk.responses.create(**GREEDY, input="x", previous_response_id=running)
    assert sdk.responses.create(**GREEDY, input="Two", previous_response_id=before.id).status == "incomplete"


def test_a_running_response_cannot_be_continued(sdk: Any, http: httpx.Client) -> None:
    with sdk.responses.create(**LONG, stream=True) as stream:
        running = next(iter(stream)).response.id
        body = {"model": MODEL, "input": "x", "previous_response_id": running}
        for store in (True, False):
            refused = http.post("/v1/responses", json={**body, "store": store})
            message = assert_error(refused, 400, "field_out_of_range", param="previous_response_id")
            assert "in_progress" in message
        assert sdk.responses.retrieve(running).status == "in_progress"


def test_a_client_that_goes_away_cancels_its_response(sdk: Any) -> None:
    with sdk.responses.create(**LONG, stream=True) as stream:
        created: Any = next(iter(stream))
    for _ in range(500):
        if (status := sdk.responses.retrieve(created.response.id).status) != "in_progress":
            break
    assert status == "cancelled"


@pytest.fixture(scope="module")
def guarded(reference: Reference) -> Iterator[dict[str, openai.OpenAI]]:
    """Clients of two tenants. Their server keeps four responses, which have room for 32 KiB."""
    keys = ("ours", "theirs")
    limits: Any = {"max_responses": 4, "max_responses_bytes": 32 << 10}
    with serve(model=str(reference.folder), api_keys=keys, **limits) as url, ExitStack() as ends:
        yield {key: ends.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)) for key in keys}


def is_kept(sdk: Any, response: Any) -> bool:
    try:
        return bool(sdk.responses.retrieve(response.id) == response)
    except openai.NotFoundError:
        return False


def test_owners_never_see_each_others_responses(guarded: dict[str, Any]) -> None:
    ours, theirs = guarded["ours"].responses, guarded["theirs"].responses
    made = ours.create(**GREEDY, input="Secret")
    reference: Any = [{"type": "item_reference", "id": made.output[0].id}]
    attempts: tuple[Callable[[], object], ...] = (
        lambda: theirs.retrieve(made.id),
        lambda: theirs.delete(made.id),
        lambda: theirs.cancel(made.id),
        lambda: theirs.input_items.list(made.id),
        lambda: theirs.create(model=MODEL, input="x", previous_response_id=made.id),
        lambda: theirs.create(model=MODEL, input=reference),
    )
    for attempt in attempts:
        with pytest.raises(openai.NotFoundError):
            attempt()
    assert ours.retrieve(made.id) == made


def test_the_conversations_unused_for_longest_give_way_with_their_sessions(guarded: dict[str, Any]) -> None:
    sdk = guarded["ours"]
    first = sdk.responses.create(**GREEDY, input="First")
    others = [sdk.responses.create(**GREEDY, input=f"Number {number}") for number in range(3)]
    sdk.responses.create(**GREEDY, input="Again", previous_response_id=first.id)
    assert [is_kept(sdk, each) for each in (first, others[0], others[2])] == [True, False, True]
    assert len(sdk.get("/sessions", cast_to=httpx.Response).json()["data"]) <= 4


@pytest.mark.parametrize(
    ("size", "goes_on", "most"), [(1, False, 4), (1, True, 9), (500, False, 6), (500, True, 6)], ids=str
)
def test_an_owner_pushes_out_its_own_responses_and_nobody_elses(
    guarded: dict[str, Any], size: int, goes_on: bool, most: int
) -> None:
    ours, theirs = guarded["ours"], guarded["theirs"]
    asked: Any = {**GREEDY, "metadata": {f"label {number}": "x" * size for number in range(12)}}
    kept = theirs.responses.create(**GREEDY, input="Theirs")
    made = [ours.responses.create(**asked, input="First")]
    for number in range(8):
        previous: Any = {"previous_response_id": made[-1].id} if goes_on and is_kept(ours, made[-1]) else {}
        made.append(ours.responses.create(**asked, input=f"Number {number}", **previous))
    assert is_kept(theirs, kept)
    left = [each for each in made if is_kept(ours, each)]
    assert 0 < len(left) <= most
    assert left == made[-len(left) :]
