"""`POST /v1/responses`, whole and streamed, as the official SDK reads it."""

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.responses.asking import CALLING, GREEDY, LOOK_UP, folded, output_of

BEGUN = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
WRITTEN = ["response.output_text.delta", "response.output_text.done"]
TEXT_EVENTS = [*BEGUN, *WRITTEN, "response.content_part.done", "response.output_item.done"]


def chat_of(sdk: Any, *messages: Any) -> Any:
    """What a chat with these messages answers."""
    asked: Any = {"model": MODEL, "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return sdk.chat.completions.create(**asked, messages=messages)


def test_a_response_says_what_a_chat_says(sdk: Any) -> None:
    chat = chat_of(sdk, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    response = sdk.responses.create(**GREEDY, instructions="Be brief.", input="Hello", metadata={"a": "b"})
    assert response.output_text == chat.choices[0].message.content
    Response.model_validate(response.model_dump())
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 8
    assert response.usage.total_tokens == response.usage.input_tokens + 8
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert (response.status, response.object, response.metadata) == ("incomplete", "response", {"a": "b"})
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    "items",
    [
        [{"role": "user", "content": "Hello"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        [{"type": "reasoning", "id": "rs_1", "summary": []}, {"role": "user", "content": "Hello"}],
    ],
    ids=["easy", "parts", "reasoning"],
)
def test_items_are_a_text_in_other_words(sdk: Any, items: Any) -> None:
    plain = sdk.responses.create(**GREEDY, input="Hello")
    assert sdk.responses.create(**GREEDY, input=items).output_text == plain.output_text


@pytest.mark.parametrize("arguments", ["{}", "["])
def test_a_whole_conversation_may_come_as_items(sdk: Any, arguments: str) -> None:
    history: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "One"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Two", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "3"}]},
    ]
    response = sdk.responses.create(**GREEDY, input=history)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = chat_of(
        sdk,
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_the_events_come_in_order_and_make_up_the_response(sdk: Any) -> None:
    events = list(sdk.responses.create(**GREEDY, input="Hello", stream=True))
    assert folded(events) == [*TEXT_EVENTS, "response.incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last, created = events[-1].response, events[0].response
    assert text == last.output_text == sdk.responses.create(**GREEDY, input="Hello").output_text
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}
    assert (created.status, created.output) == ("in_progress", [])
    assert sdk.responses.retrieve(created.id).output_text == text


def test_a_required_call_is_made_and_streamed(sdk: Any) -> None:
    events = list(sdk.responses.create(**CALLING, input="Look it up", stream=True))
    assert folded(events) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    (call,) = events[-1].response.output
    assert (call.type, call.name, call.status) == ("function_call", "look_up", "completed")
    assert json.loads(call.arguments).keys() == {"deep"}
    assert call.id.startswith("fc_")
    assert call.call_id != call.id
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert events[-1].response.completed_at is not None


def test_the_text_has_its_form(sdk: Any) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form: Any = {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": schema}}
    response = sdk.responses.create(model=MODEL, input="x", text=form, max_output_tokens=500)
    assert response.text.format.type == "json_schema"
    assert json.loads(response.output_text).keys() == {"a"}
    some = sdk.responses.create(model=MODEL, input="x", text={"format": {"type": "json_object"}}, max_output_tokens=50)
    assert some.output_text.lstrip().startswith("{")


@pytest.mark.parametrize("text", [None, {"format": None}])
def test_the_form_is_any_text_unless_another_is_asked_for(sdk: Any, text: Any) -> None:
    response = sdk.responses.create(model=MODEL, input="x", max_output_tokens=2, extra_body={"text": text})
    assert response.text.model_dump(exclude_none=True) == {"format": {"type": "text"}}


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "nonsense"}]}, "input.0"),
        ({"input": [output_of("c9")]}, "input"),
        ({"tools": [{"type": "websearch"}]}, "tools.0"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [LOOK_UP]}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"background": True, "store": False}, "background"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"input": "x" * 2000}, "input"),
        ({"stream_id": "a"}, "stream_id"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(http: httpx.Client, wrong: Any, param: str) -> None:
    response = http.post("/v1/responses", json={"model": MODEL, "input": "x", **wrong})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert "messages" not in response.json()["error"]["message"]


def test_unknown_names_are_not_found(http: httpx.Client) -> None:
    body = {"model": MODEL, "input": "x"}
    assert_error(http.post("/v1/responses", json={**body, "model": "m"}), 404, "model_not_found", param="model")
    gone = http.post("/v1/responses", json={**body, "previous_response_id": "resp_0"})
    assert_error(gone, 404, "not_found", param="previous_response_id")
    unknown = http.post("/v1/responses", json={**body, "input": [{"type": "item_reference", "id": "msg_0"}]})
    assert_error(unknown, 404, "not_found", param="input")


def test_fields_without_effect_are_named(http: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "input": [{"type": "reasoning", "id": "rs", "summary": []}, {"role": "user", "content": "x", "phase": "p"}],
        "max_output_tokens": 1,
        "reasoning": {"effort": "low"},
        "include": ["reasoning.encrypted_content"],
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "text": {"verbosity": "high"},
        "unheard_of": 1,
    }
    response = http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    named = {"input.0", "input.1.phase", "reasoning", "include.0", "prompt_cache_key", "text.verbosity", "unheard_of"}
    assert set(response.headers["X-Djinn-Ignored"].split(", ")) == named
