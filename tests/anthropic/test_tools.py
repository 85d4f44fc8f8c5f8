"""Tools, as the official SDK sends and reads them."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest

from tests.anthropic.conftest import MODEL, prompt_of, text_of
from tests.tool_schemas import ENDS, SCHEMAS

CALL: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Which?"}],
    "tools": [{"name": name, "description": "of use", "input_schema": schema} for name, schema in SCHEMAS.items()],
    "max_tokens": 400,
    "extra_body": {"seed": 5, "logit_bias": ENDS},
}
ANY: Any = {"type": "any"}


def check_calls(message: anthropic.types.Message) -> list[tuple[str, dict[str, object]]]:
    """That every call is one that its tool takes; returns the tools, and what they are called with."""
    calls = [block for block in message.content if block.type == "tool_use"]
    for call in calls:
        assert call.id.startswith("toolu_")
        jsonschema.validate(call.input, SCHEMAS[call.name])
    assert len({call.id for call in calls}) == len(calls)
    return [(call.name, call.input) for call in calls]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "now"}], ids=str)
def test_a_tool_is_called_where_one_must_be(sdk: anthropic.Anthropic, choice: Any) -> None:
    asked: Any = {**CALL, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    answer = sdk.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    ((name, _),) = check_calls(answer)
    assert (len(answer.content), name) == (1, choice.get("name", name))


def test_nothing_is_called_where_nothing_may_be(sdk: anthropic.Anthropic) -> None:
    answer = sdk.messages.create(**{**CALL, "max_tokens": 8}, tool_choice={"type": "none"})
    assert text_of(answer)
    asked = {name: CALL[name] for name in ("model", "messages", "tools")}
    assert prompt_of(answer.usage) == sdk.messages.count_tokens(**asked).input_tokens


def test_a_stream_adds_up_to_the_whole_answer(sdk: anthropic.Anthropic) -> None:
    whole = sdk.messages.create(**CALL, tool_choice=ANY)
    with sdk.messages.stream(**CALL, tool_choice=ANY) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert check_calls(final) == check_calls(whole) != []
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert sum(event.type == "input_json" for event in events) > 2
    starts = [event.content_block for event in events if event.type == "content_block_start"]
    assert [block.input for block in starts if block.type == "tool_use"] == [{}] * len(check_calls(whole))


def test_an_agent_that_signals_nothing_waits_off_the_device(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    bound: Any = {"extra_headers": {"X-Session-ID": "weather-agent"}}
    first = sdk.messages.with_raw_response.create(**CALL, tool_choice=ANY, **bound)
    session = f"/v1/sessions/{first.headers['x-session-id']}"
    assert http.get(session).json()["phase"] == "io_wait"
    chosen: Any = {"type": "tool", "name": "get_weather"}
    cut = sdk.messages.create(**{**CALL, "max_tokens": 60}, tool_choice=chosen, **bound)
    assert (cut.stop_reason, [block.type for block in cut.content]) == ("max_tokens", ["tool_use"])
    assert http.get(session).json()["phase"] == "compute"  # it is no call to make
    answer = first.parse()
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "42"}]}
        for block in answer.content
        if block.type == "tool_use"
    ]
    chat: Any = [
        *CALL["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]},
    ]
    second = sdk.messages.create(**{**CALL, "messages": chat, "max_tokens": 4}, tool_choice={"type": "none"}, **bound)
    assert http.get(session).json()["phase"] == "compute"
    assert (second.usage.cache_read_input_tokens or 0) > 0.8 * prompt_of(answer.usage)


def test_results_of_tools_are_read_as_a_chat_reads_them(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    call: Any = {"type": "tool_use", "id": "toolu_a1", "name": "now", "input": {"zone": "UTC"}}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_a1", "content": "12:00", "is_error": True}
    messages: Any = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, call]},
        {"role": "user", "content": [result]},
    ]
    counted = sdk.messages.count_tokens(model=MODEL, tools=CALL["tools"], messages=messages).input_tokens
    function = {"name": "now", "arguments": json.dumps(call["input"])}
    chat = [
        {"role": "user", "content": "Time?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "a1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a1", "content": "Error: 12:00"},
    ]
    told = {"description": "of use"}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, **told}}
        for name, schema in SCHEMAS.items()
    ]
    assert counted == http.post("/tokenize", json={"messages": chat, "tools": tools}).json()["count"]
