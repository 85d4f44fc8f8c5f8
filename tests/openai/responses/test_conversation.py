"""Conversations on the server: only new items travel, the session keeps their KV, and `kill -9` ends none."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.responses.asking import CALLING, GREEDY, LETTERS, LOOK_UP, output_of
from tests.processes import ServerProcess, serve_process


def session_of(sdk: Any, **asked: Any) -> tuple[Any, str | None]:
    raw = sdk.responses.with_raw_response.create(**asked)
    return raw.parse(), raw.headers.get("x-session-id")


def test_the_server_keeps_the_items(sdk: Any) -> None:
    first, session = session_of(sdk, **LETTERS, input="A question for responses comes first, and it is long.")
    second, same = session_of(sdk, **LETTERS, input="And the second?", previous_response_id=first.id)
    assert session == same
    whole: Any = [
        {"role": "user", "content": "A question for responses comes first, and it is long."},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"role": "user", "content": "And the second?"},
    ]
    told = sdk.responses.create(**LETTERS, input=whole)
    assert (second.output_text, second.usage.input_tokens) == (told.output_text, told.usage and told.usage.input_tokens)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert second.previous_response_id == first.id


def test_a_response_that_is_not_the_latest_goes_on_in_another_session(sdk: Any) -> None:
    first, session = session_of(sdk, **LETTERS, input="One")
    second, _ = session_of(sdk, **LETTERS, input="Two", previous_response_id=first.id)
    branch, other = session_of(sdk, **LETTERS, input="Two", previous_response_id=first.id)
    assert session != other
    assert branch.output_text == second.output_text
    third, there = session_of(sdk, **LETTERS, input="Three", previous_response_id=branch.id)
    assert there == other
    again, here = session_of(sdk, **LETTERS, input="Three", previous_response_id=second.id)
    assert here == session
    items: Any = [
        {"role": "user", "content": "One"},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "Two"},
    ]
    assert third.output_text == again.output_text
    assert sdk.responses.create(**LETTERS, input=items).output_text == second.output_text


def test_instructions_are_of_one_response_only(sdk: Any) -> None:
    first = sdk.responses.create(**GREEDY, input="One", instructions="Speak like a pirate.")
    second = sdk.responses.create(**GREEDY, input="Two", previous_response_id=first.id)
    third = sdk.responses.create(**GREEDY, input="Two", previous_response_id=first.id, instructions="Be brief.")
    assert second.instructions is None
    assert third.usage.input_tokens > second.usage.input_tokens


def test_a_response_that_is_not_stored_is_not_kept(sdk: Any, http: httpx.Client) -> None:
    first = sdk.responses.create(**GREEDY, input="One")
    before = len(http.get("/v1/sessions", params={"limit": 100}).json()["data"])
    unstored, session = session_of(sdk, **GREEDY, input="Two", previous_response_id=first.id, store=False)
    stored = sdk.responses.create(**GREEDY, input="Two", previous_response_id=first.id)
    assert unstored.output_text == stored.output_text
    assert session is None
    assert len(http.get("/v1/sessions", params={"limit": 100}).json()["data"]) == before
    assert_error(http.get(f"/v1/responses/{unstored.id}"), 404, "not_found", param="response_id")


def test_a_session_may_be_named(sdk: Any, http: httpx.Client) -> None:
    bound: Any = {"extra_headers": {"X-Session-ID": "named-by-responses"}}
    first, session = session_of(sdk, **GREEDY, **bound, input="One")
    second, same = session_of(sdk, **GREEDY, **bound, input="Two", previous_response_id=first.id)
    third, still = session_of(sdk, **GREEDY, input="Three", previous_response_id=second.id)
    assert session == same == still
    for response in (first, second, third):
        sdk.responses.delete(response.id)
    assert http.get(f"/v1/sessions/{session}").status_code == 200  # it is the caller's, by its name


def test_a_call_parks_the_session_and_its_output_goes_on(sdk: Any, http: httpx.Client) -> None:
    first, session = session_of(sdk, **CALLING, input="Look it up")
    assert http.get(f"/v1/sessions/{session}").json()["phase"] == "io_wait"
    (call,) = first.output
    asked: Any = {**GREEDY, "tools": [LOOK_UP], "tool_choice": "none"}
    second, same = session_of(sdk, **asked, input=[output_of(call.call_id)], previous_response_id=first.id)
    assert same == session
    assert http.get(f"/v1/sessions/{session}").json()["phase"] == "compute"
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
    unknown = http.post(
        "/v1/responses", json={"model": MODEL, "input": [output_of("nobody")], "previous_response_id": first.id}
    )
    assert_error(unknown, 400, "field_out_of_range", param="input")


def test_a_closed_session_takes_its_responses_along(sdk: Any, http: httpx.Client) -> None:
    first, session = session_of(sdk, **GREEDY, input="One")
    http.delete(f"/v1/sessions/{session}").raise_for_status()
    assert_error(http.get(f"/v1/responses/{first.id}"), 404, "not_found", param="response_id")
    assert sdk.responses.create(**GREEDY, input="Two").output  # and the server goes on


CATALOGUED = "tiny-llama"
ASKED: Any = {**GREEDY, "model": CATALOGUED}


@contextmanager
def serving(folder: Path) -> Iterator[tuple[ServerProcess, Any]]:
    with (
        serve_process(folder) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as sdk,
    ):
        yield server, sdk


@pytest.mark.long
def test_a_conversation_goes_on_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serving(folder) as (server, sdk):
        first = sdk.responses.create(**ASKED, input="One")
        second = sdk.responses.create(**ASKED, input="Two", previous_response_id=first.id)
        branch = sdk.responses.create(**ASKED, input="Other", previous_response_id=first.id)
        deleted = sdk.responses.create(**ASKED, input="Gone")
        calling = sdk.responses.create(**{**CALLING, "model": CATALOGUED}, input="Look it up")
        sdk.responses.delete(deleted.id)
        sdk.responses.delete(first.id)
        expected = sdk.responses.create(**ASKED, input="Three", previous_response_id=second.id, store=False)
        asked_by_branch = sdk.responses.create(**ASKED, input="Three", previous_response_id=branch.id, store=False)
        running = sdk.responses.create(model=CATALOGUED, input="x", stream=True, extra_body={"ignore_eos": True})
        created = next(iter(running)).response
        server.kill()
        running.close()
    with serving(folder) as (server, sdk):
        assert sdk.responses.retrieve(second.id) == second
        for gone in (deleted, first, created):
            with pytest.raises(openai.NotFoundError):
                sdk.responses.retrieve(gone.id)
        third = sdk.responses.create(**ASKED, input="Three", previous_response_id=second.id)
        assert third.output_text == expected.output_text
        other = sdk.responses.create(**ASKED, input="Three", previous_response_id=branch.id)
        assert other.output_text == asked_by_branch.output_text
        output = output_of(calling.output[0].call_id)
        asked: Any = {**ASKED, "tools": [LOOK_UP], "tool_choice": "none"}
        answered = sdk.responses.create(**asked, input=[output], previous_response_id=calling.id)
        assert answered.usage.input_tokens > calling.usage.input_tokens
        server.kill()
    with serving(folder) as (_, sdk):
        assert sdk.responses.retrieve(third.id) == third
        assert [item.type for item in sdk.responses.input_items.list(third.id)] == ["message"]
