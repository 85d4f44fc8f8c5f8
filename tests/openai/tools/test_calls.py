"""The calls in an answer: their arguments, ids and tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.openai.tools.asking import CALL, NOW, check_calls
from tests.tool_schemas import ZONE


def test_a_call_has_no_argument_that_its_schema_does_not_name(sdk: openai.OpenAI) -> None:
    """A model of random weights would add keys until its tokens run out."""
    open_schema = {key: value for key, value in ZONE.items() if key != "additionalProperties"}
    tools: Any = [{"type": "function", "function": {"name": "now", "parameters": open_schema}}]
    for seed in range(4):
        answer = sdk.chat.completions.create(**{**CALL, "tools": tools, "seed": seed}, tool_choice=NOW)
        assert check_calls(answer.choices[0].message) == ["now"]


@pytest.mark.parametrize("about", [{}, {"parameters": {"type": "object", "properties": {}}}])
def test_a_function_without_parameters_is_called_with_an_empty_object(sdk: openai.OpenAI, about: Any) -> None:
    tools: Any = [{"type": "function", "function": {"name": "now", **about}}]
    (choice,) = sdk.chat.completions.create(**{**CALL, "tools": tools}, tool_choice=NOW).choices
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {}


def test_every_choice_has_calls_of_its_own(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(**CALL, tool_choice="required", n=3)
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert all(check_calls(choice.message) for choice in answer.choices)
    assert len(set(ids)) == len(ids)


def test_logprobs_of_a_call_are_those_of_all_its_tokens(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(**CALL, tool_choice="required", logprobs=True)
    assert answer.usage is not None
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or ()) == answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_whole_answer(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(**CALL, tool_choice="required", temperature=0).choices[0].message
    with sdk.chat.completions.stream(**CALL, tool_choice="required", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert [call.function for call in whole.tool_calls or () if call.type == "function"]
    streamed = final.choices[0].message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in streamed] == [
        (call.function.name, call.function.arguments) for call in whole.tool_calls or () if call.type == "function"
    ]
    assert final.choices[0].finish_reason == "tool_calls"
    assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) > 2


def test_the_first_delta_of_a_call_names_it_and_the_others_bring_arguments(http: httpx.Client) -> None:
    body = {**CALL, "tool_choice": "required", "parallel_tool_calls": False, "stream": True, "temperature": 0}
    lines = [line[6:] for line in http.post("/v1/chat/completions", json=body).text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["delta"] == {}
    assert chunks[-1]["finish_reason"] == "tool_calls"
    first, *others = [chunk["delta"]["tool_calls"][0] for chunk in chunks[1:-1]]
    assert first.keys() == {"index", "id", "type", "function"}
    assert first["function"]["arguments"] == ""
    assert all(each.keys() == {"index", "function"} for each in others)
    assert all(each["function"].keys() == {"arguments"} for each in others)
