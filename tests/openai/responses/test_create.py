"""`POST /v1/responses`, whole and streamed, as the official SDK reads it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.responses.asking import CALLING, GREEDY, LOOK_UP, folded

TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def test_a_response_says_what_a_chat_says(sdk: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chat = sdk.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    response = sdk.responses.create(**GREEDY, instructions="Be brief.", input="Hello", metadata={"a": "b"})
    assert response.output_text == chat.choices[0].message.content
    Response.model_validate(response.model_dump())
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 8
    assert response.usage.total_tokens == response.usage.input_tokens + 8
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert (response.status, response.object, response.metadata) == ("incomplete", "response", {"a": "b"})
    assert response.incomplete_details is not None
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
def test_items_are_a_text_in_other_words(sdk: openai.OpenAI, items: Any) -> None:
    plain = sdk.responses.create(**GREEDY, input="Hello")
    assert sdk.responses.create(**GREEDY, input=items).output_text == plain.output_text


def test_a_whole_conversation_may_come_as_items(sdk: openai.OpenAI) -> None:
    history: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "One"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Two", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "3"}]},
    ]
    response = sdk.responses.create(**GREEDY, input=history)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    chat = sdk.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert response.output_text == chat.choices[0].message.content


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "text"])
def test_arguments_that_are_no_object_are_read_as_a_chat_reads_them(sdk: openai.OpenAI, arguments: str) -> None:
    item: Any = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}
    response = sdk.responses.create(**GREEDY, input=[{"role": "user", "content": "x"}, item])
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages: Any = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    chat = sdk.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_the_events_come_in_order_and_make_up_the_response(sdk: openai.OpenAI) -> None:
    events = list(sdk.responses.create(**GREEDY, input="Hello", stream=True))
    assert folded(events) == [*TEXT_EVENTS, "response.incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert text == last.response.output_text == sdk.responses.create(**GREEDY, input="Hello").output_text
    item_ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert item_ids == {last.response.output[0].id}
    created: Any = events[0]
    assert (created.response.status, created.response.output) == ("in_progress", [])
    assert sdk.responses.retrieve(created.response.id).output_text == text


def test_the_stream_is_named_events_without_a_done(http: httpx.Client) -> None:
    body = {"model": MODEL, "input": "x", "max_output_tokens": 2, "stream": True}
    response = http.post("/v1/responses", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    for name, data in events:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert "[DONE]" not in response.text


def test_the_sdk_puts_a_stream_together(sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(**CALLING, input="Look it up") as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert json.loads(call.arguments).keys() == {"deep"}


def test_a_required_call_is_made_and_streamed(sdk: openai.OpenAI) -> None:
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
    last: Any = events[-1]
    (call,) = last.response.output
    assert (call.type, call.name, call.status) == ("function_call", "look_up", "completed")
    assert json.loads(call.arguments).keys() == {"deep"}
    assert call.id.startswith("fc_")
    assert call.call_id != call.id
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert last.response.completed_at is not None


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "look_up"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look_up"}]},
    ],
)
def test_one_function_may_be_named(sdk: openai.OpenAI, choice: Any) -> None:
    asked = {**CALLING, "tools": [LOOK_UP, {"type": "function", "name": "other"}], "tool_choice": choice}
    response = sdk.responses.create(**asked, input="x")
    assert [item.name for item in response.output if item.type == "function_call"] == ["look_up"]
    assert response.tool_choice is not None


@pytest.mark.parametrize(
    "form",
    [
        {
            "type": "json_schema",
            "name": "n",
            "strict": True,
            "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        },
        {"type": "json_object"},
    ],
)
def test_the_text_has_its_form(sdk: openai.OpenAI, form: Any) -> None:
    asked: Any = {"model": MODEL, "input": "x", "text": {"format": form}, "max_output_tokens": 500}
    asked["extra_body"] = {"logit_bias": {str(ord("}") + 3): 5}}
    response = sdk.responses.create(**asked)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == form["type"]
    if response.status == "completed":
        assert isinstance(json.loads(response.output_text), dict)
    assert response.output_text.lstrip().startswith("{")


@pytest.mark.parametrize("text", [None, {}, {"format": None}, {"format": {"type": "text"}}])
def test_the_form_is_any_text_unless_another_is_asked_for(sdk: openai.OpenAI, text: Any) -> None:
    response = sdk.responses.create(model=MODEL, input="x", max_output_tokens=2, extra_body={"text": text})
    assert response.text is not None
    assert response.text.model_dump(exclude_none=True) == {"format": {"type": "text"}}


def test_log_probabilities_are_told_of_each_token(sdk: openai.OpenAI) -> None:
    asked = {**GREEDY, "input": "Hello", "top_logprobs": 2}
    part: Any = sdk.responses.create(**asked).output[0]
    logprobs = part.content[0].logprobs
    assert len(logprobs) == 8
    assert all(len(each.top_logprobs) == 2 for each in logprobs)
    events = list(sdk.responses.create(**asked, stream=True))
    told = [each.token for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert told == [each.token for each in logprobs]


TOOL_OUTPUT: Any = [{"type": "function_call_output", "call_id": "c9", "output": "x"}]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
        ),
        ({"input": TOOL_OUTPUT}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [LOOK_UP]}, "tool_choice"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"input": "x" * 2000}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
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
    named = set(response.headers["X-Djinn-Ignored"].split(", "))
    assert named == {
        "input.0",
        "input.1.phase",
        "reasoning",
        "include.0",
        "prompt_cache_key",
        "text.verbosity",
        "unheard_of",
    }
