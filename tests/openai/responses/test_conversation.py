"""Conversations on the server: only new items travel, the session keeps their KV, and `kill -9` ends none."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.routers.api_calls import ApiCall
from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.responses.asking import CALLING, GREEDY, LETTERS, LONG, LOOK_UP, output_of
from tests.processes import ServerProcess, serve_process
from tests.serving import serve


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
    before = http.get("/v1/memory").json()["sessions"]
    unstored, session = session_of(sdk, **GREEDY, input="Two", previous_response_id=first.id, store=False)
    stored = sdk.responses.create(**GREEDY, input="Two", previous_response_id=first.id)
    assert unstored.output_text == stored.output_text
    assert session is not None
    assert http.get("/v1/memory").json()["sessions"] == before + 1
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


def texts_of(sdk: Any, conversation: str, **query: Any) -> list[str]:
    listed: Any = sdk.conversations.items.list(conversation, **query)
    return [item.content[0].text for item in listed]


def test_a_conversation_keeps_the_items_of_its_responses(sdk: Any, http: httpx.Client) -> None:
    user: Any = {"type": "message", "role": "user", "content": "One"}
    held = sdk.conversations.create(items=[user], metadata={"topic": "numbers"})
    assert (held.object, held.metadata, held.id[:5]) == ("conversation", {"topic": "numbers"}, "conv_")
    first, session = session_of(sdk, **GREEDY, input="Two", conversation=held.id)
    second, same = session_of(sdk, **GREEDY, input="Three", conversation={"id": held.id}, store=False)
    assert session == same
    assert first.conversation.id == second.conversation.id == held.id
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    said = ["One", "Two", first.output_text, "Three", second.output_text]
    assert texts_of(sdk, held.id, order="asc", limit=2) == said  # the SDK reads page after page
    assert texts_of(sdk, held.id) == said[::-1]
    whole = sdk.responses.create(**GREEDY, input=[user, {"role": "user", "content": "Two"}])
    assert (whole.output_text, whole.usage.input_tokens) == (first.output_text, first.usage.input_tokens)
    assert sdk.responses.retrieve(first.id) == first
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(second.id)
    branch = sdk.responses.create(**GREEDY, input="Aside", previous_response_id=first.id)
    sdk.responses.delete(branch.id)
    sdk.responses.delete(first.id)
    assert texts_of(sdk, held.id, order="asc") == said
    deleted = sdk.conversations.delete(held.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (held.id, "conversation.deleted", True)
    for gone in (sdk.conversations.retrieve, sdk.conversations.items.list, sdk.conversations.delete):
        with pytest.raises(openai.NotFoundError):
            gone(held.id)
    assert http.get(f"/v1/sessions/{session}").status_code == 404


def test_items_are_added_read_and_removed(sdk: Any, http: httpx.Client) -> None:
    held = sdk.conversations.create()
    assert texts_of(sdk, held.id) == []
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items: Any = [{"role": "user", "content": "One", "type": "message"}, call, {"role": "user", "content": "Two"}]
    added = sdk.conversations.items.create(held.id, items=items)
    assert [item.type for item in added.data] == ["message", "function_call", "message"]
    last = added.data[2]
    assert sdk.conversations.items.retrieve(last.id, conversation_id=held.id) == last
    own = {"role": "user", "content": "Own", "type": "message", "id": "msg/a b"}
    [named] = sdk.conversations.items.create(held.id, items=[own]).data
    assert http.get(f"/v1/conversations/{held.id}/items/msg%2Fa%20b").json() == named.to_dict(warnings=False)
    reference: Any = {"type": "item_reference", "id": named.id}
    by_reference, by_value = (
        sdk.responses.create(**GREEDY, input=[{**each}], store=False) for each in (reference, own | {"id": "b"})
    )
    assert by_reference.output_text == by_value.output_text
    assert http.delete(f"/v1/conversations/{held.id}/items/msg/a b").status_code == 200
    with pytest.raises(openai.NotFoundError):
        sdk.responses.create(**GREEDY, input=[reference])
    before, session = session_of(sdk, **GREEDY, input="Three", conversation=held.id)
    assert sdk.conversations.items.delete(last.id, conversation_id=held.id) == held
    with pytest.raises(openai.NotFoundError):
        sdk.conversations.items.retrieve(last.id, conversation_id=held.id)
    sdk.conversations.items.delete(before.output[0].id, conversation_id=held.id)
    after = sdk.responses.create(**GREEDY, input=[output_of("c")], conversation=held.id)
    told = sdk.responses.create(**GREEDY, input=[items[0], call, {"role": "user", "content": "Three"}, output_of("c")])
    assert (after.output_text, after.usage.input_tokens) == (told.output_text, told.usage.input_tokens)
    assert sdk.responses.retrieve(before.id) == before
    assert sdk.conversations.update(held.id, metadata={"a": "b"}).metadata == {"a": "b"}
    at = f"/v1/sessions/{session}"
    assert http.get(at).json()["metadata"] == {"a": "b"}, "they are the session's"
    used = http.patch(at, json={"metadata": {"a": "c"}}).json()["used_at"]
    assert sdk.conversations.retrieve(held.id).metadata == {"a": "c"}
    sdk.conversations.items.create(held.id, items=items[:1])
    assert http.get(at).json()["used_at"] > used, "it is in use"
    sdk.conversations.items.delete(added.data[1].id, conversation_id=held.id)
    wrong: list[tuple[Any, str]] = [
        ({"items": []}, "items"),
        ({"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ({"items": [output_of("nobody")]}, "items"),
        ({"items": [output_of("c")]}, "items"),
        ({"items": [{"role": "user", "content": "x", "id": added.data[0].id}]}, "items"),
    ]
    for body, param in wrong:
        assert_error(http.post(f"/v1/conversations/{held.id}/items", json=body), 400, "field_out_of_range", param=param)
    for fields in ({"previous_response_id": before.id}, {"extra_headers": {"X-Session-ID": "another"}}):
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.responses.create(**GREEDY, input="x", conversation=held.id, **fields)
        assert refused.value.param == "conversation"
    with pytest.raises(openai.BadRequestError, match="was removed"):
        sdk.responses.create(**GREEDY, input=[{"role": "user", "content": "x", "id": last.id}], conversation=held.id)


@pytest.mark.parametrize("removes", [True, False])
def test_a_conversation_runs_one_response_at_a_time(sdk: Any, monkeypatch: pytest.MonkeyPatch, removes: bool) -> None:
    held = sdk.conversations.create(items=[{"role": "user", "content": "One"}])
    [one], asked = sdk.conversations.items.list(held.id), {**GREEDY, "input": "Two", "conversation": held.id}
    removal: Any = partial(sdk.conversations.items.delete, one.id, conversation_id=held.id)

    async def meanwhile(*_: Any) -> None:
        monkeypatch.undo()
        await asyncio.to_thread(removal if removes else partial(sdk.responses.create, **asked))

    monkeypatch.setattr(ApiCall, "meet_busy", meanwhile)
    with pytest.raises(openai.ConflictError, match="has other items"):
        sdk.responses.create(**asked)
    with sdk.responses.create(**LONG, conversation=held.id, stream=True) as stream:
        next(iter(stream))
        for refused in (partial(sdk.responses.create, **asked), partial(sdk.conversations.delete, held.id)):
            with pytest.raises(openai.ConflictError, match="one runs at a time"):
                refused()


def test_a_conversation_is_its_tenants_alone_and_comes_back(tmp_path: Path) -> None:
    ports: Any = {"api_keys": ("one", "two"), "state_dir": tmp_path}
    asked: Any = {**GREEDY, "model": "tiny-llama"}

    def client_of(url: str, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)

    with serve(**ports) as url, client_of(url, "one") as sdk, client_of(url, "two") as other:
        held = sdk.conversations.create(items=[{"role": "user", "content": "One"}], metadata={"a": "b"})
        first: Any = sdk.responses.create(**asked, input="Two", conversation=held.id)
        removed, *_ = sdk.conversations.items.list(held.id, order="asc")
        sdk.conversations.items.delete(str(removed.id), conversation_id=held.id)
        with pytest.raises(openai.NotFoundError):
            other.conversations.retrieve(held.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(**asked, input="x", conversation=held.id)
    with serve(**ports) as url, client_of(url, "one") as sdk:
        assert sdk.conversations.retrieve(held.id) == held
        assert texts_of(sdk, held.id, order="asc") == ["Two", first.output_text]
        sdk.responses.create(**asked, input="Three", conversation=held.id)
        assert texts_of(sdk, held.id, order="asc")[:3] == ["Two", first.output_text, "Three"]


def test_counted_tokens_are_those_that_a_response_then_reads(sdk: Any, http: httpx.Client) -> None:
    first = sdk.responses.create(**GREEDY, input="One")
    held = sdk.conversations.create(items=[{"role": "user", "content": "One"}])
    for asked in (
        {"input": "x", "instructions": "Be brief.", "tools": [LOOK_UP]},
        {"input": [{"role": "user", "content": "x"}], "tools": [LOOK_UP], "tool_choice": "none"},
        {"input": "Two", "previous_response_id": first.id},
        {"input": "Two", "conversation": held.id},
    ):
        counted = sdk.responses.input_tokens.count(model=MODEL, **asked).input_tokens
        assert counted == sdk.responses.input_tokens.count(**asked).input_tokens
        assert counted == sdk.responses.create(**{**GREEDY, "store": False, **asked}).usage.input_tokens
    for param, wrong in (("input", {}), ("tools", {"input": "x", "tools": [LOOK_UP, LOOK_UP]})):
        refused = http.post("/v1/responses/input_tokens", json=wrong)
        assert_error(refused, 400, "field_out_of_range", param=param)


def test_a_conversation_is_shortened_to_its_users_words_and_a_summary(sdk: Any, http: httpx.Client) -> None:
    sdk._strict_response_validation = False  # its own type of a compaction has no messages of users
    form = {"format": {"type": "json_schema", "name": "said", "schema": {"const": "In short"}}}
    asked: Any = {"model": MODEL, "extra_body": {"text": form, "temperature": 0}}
    first = sdk.responses.create(**GREEDY, input="One")
    short = sdk.responses.compact(**asked, input="Two", previous_response_id=first.id, instructions="Be brief.")
    assert short.object == "response.compaction"
    assert [item.type for item in short.output] == ["message", "message", "compaction"]
    assert [item.content[0].text for item in short.output[:2]] == ["One", "Two"]
    items: Any = [item.to_dict(warnings=False) for item in short.output]
    raw = sdk.responses.with_raw_response.create(**GREEDY, input=[*items, {"role": "user", "content": "Three"}])
    assert "x-djinn-ignored" not in raw.headers
    without = sdk.responses.create(**GREEDY, input=[*items[:2], {"role": "user", "content": "Three"}])
    assert raw.parse().usage.input_tokens > without.usage.input_tokens + 8, "the summary is read"
    cut_by = "max_output_tokens"  # without it, by a quarter of the context
    for cut, param in (({cut_by: 1}, cut_by), ({}, cut_by), ({"generate": False}, "input")):
        with pytest.raises(openai.BadRequestError, match="no whole summary") as cut_short:
            sdk.responses.compact(model=MODEL, input="Two", extra_body={"ignore_eos": True, **cut})
        problem = cut_short.value
        assert (problem.param, "a higher" in problem.message) == (param, param != "input")
    again = sdk.responses.compact(**asked, input=items)
    assert [item.type for item in again.output] == ["message", "message", "compaction"], "it replaces the one before"
    forged = {**items[2], "encrypted_content": "AAAA" + items[2]["encrypted_content"][4:]}
    raw = sdk.responses.with_raw_response.create(**GREEDY, input=[items[0], forged])
    assert raw.headers["x-djinn-ignored"] == "input.1"
    told = {"model": MODEL, "input": "x", "text": form, "temperature": 0, "store": True, "tool_choice": "required"}
    named = http.post("/v1/responses/compact", json=told).raise_for_status().headers["x-djinn-ignored"]
    assert set(named.split(", ")) == {"store", "tool_choice"}
    unknown = http.post("/v1/conversations", json={"items": [{"type": "item_reference", "id": "msg_0"}]})
    assert_error(unknown, 404, "not_found", param="items")
    refused = http.post("/v1/responses/compact", json={"model": MODEL})
    assert_error(refused, 400, "field_out_of_range", param="input")


def test_a_conversation_that_fills_the_context_is_shortened(sdk: Any, http: httpx.Client) -> None:
    said = [letter * 300 for letter in "abc"]
    held = sdk.conversations.create(items=[{"role": "user", "content": each} for each in said])
    longer = http.post(f"/v1/conversations/{held.id}/items", json={"items": [{"role": "user", "content": "d" * 300}]})
    assert_error(longer, 400, "context_length_exceeded", param="items")
    form = {"format": {"type": "json_schema", "name": "said", "schema": {"const": "In short"}}}
    body = {"model": MODEL, "conversation": {"id": held.id, "x": 1}, "text": form, "max_output_tokens": 100}
    told = http.post("/v1/responses/compact", json=body).raise_for_status()
    assert told.headers["x-djinn-ignored"] == "conversation.x"
    short = told.json()
    assert short["djinn"] == {"left_out": 1}
    assert [item["content"][0]["text"] for item in short["output"][:-1]] == said[2:], "of half of the context"
    assert texts_of(sdk, held.id, order="asc") == said
    assert sdk.responses.create(**GREEDY, input=[*short["output"], {"role": "user", "content": "Go on"}]).output_text


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
