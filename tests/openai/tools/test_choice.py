"""Which tools a chat allows or requires, and which the model then calls."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.tools.asking import CALL, CHAT, check_calls
from tests.tool_schemas import PLACE, SCHEMAS, ZONE


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_is_one_that_the_tool_takes(sdk: openai.OpenAI, seed: int) -> None:
    answer = sdk.chat.completions.create(**{**CALL, "seed": seed}, tool_choice="required", parallel_tool_calls=False)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert len(check_calls(choice.message)) == 1


@pytest.mark.parametrize("max_tokens", [3, 14, 20])
def test_a_required_call_that_is_cut_is_no_text(sdk: openai.OpenAI, max_tokens: int) -> None:
    answer = sdk.chat.completions.create(**{**CALL, "max_tokens": max_tokens}, tool_choice="required")
    assert answer.choices[0].finish_reason == "length"
    assert not answer.choices[0].message.content


def test_a_named_tool_is_the_one_that_is_called(sdk: openai.OpenAI) -> None:
    for name in SCHEMAS:
        chosen: Any = {"type": "function", "function": {"name": name}}
        answer = sdk.chat.completions.create(**CALL, tool_choice=chosen)
        assert check_calls(answer.choices[0].message) == [name]


def test_only_allowed_tools_are_called(sdk: openai.OpenAI) -> None:
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    chosen: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = sdk.chat.completions.create(**CALL, tool_choice=chosen)
    assert set(check_calls(answer.choices[0].message)) == {"now"}


def test_the_model_decides_unless_told_otherwise(sdk: openai.OpenAI) -> None:
    """A model of random weights calls nothing: its answer is what it would be of the same prompt."""
    answer = sdk.chat.completions.create(**{**CALL, "max_tokens": 8}, temperature=0)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")
    none = sdk.chat.completions.create(**{**CALL, "max_tokens": 8}, temperature=0, tool_choice="none")
    assert (none.choices[0].message.content or "").rstrip() == (answer.choices[0].message.content or "").rstrip()
    assert none.usage is not None
    assert answer.usage is not None
    assert none.usage.total_tokens == answer.usage.total_tokens


def test_an_answer_has_the_asked_form_or_is_calls(sdk: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "zone", "schema": ZONE}}
    said = set()
    for seed in range(6):
        answer = sdk.chat.completions.create(**{**CALL, "seed": seed}, response_format=form)
        message = answer.choices[0].message
        if not check_calls(message):
            jsonschema.validate(json.loads(message.content or ""), ZONE)
        said.add(answer.choices[0].finish_reason)
    assert said <= {"stop", "tool_calls"}


def test_a_form_beside_required_calls_is_checked_and_named(http: httpx.Client) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PLACE}}}
    answer = http.post("/v1/chat/completions", json={**CALL, **form, "tool_choice": "required"})
    assert answer.headers["X-Djinn-Ignored"] == "response_format"
    assert answer.json()["choices"][0]["message"]["tool_calls"]
    decided = http.post("/v1/chat/completions", json={**CALL, **form})
    assert "X-Djinn-Ignored" not in decided.headers
    wrong = {"structured_outputs": {"regex": "a"}, "tool_choice": "required"}
    assert_error(
        http.post("/v1/chat/completions", json={**CALL, **wrong}),
        400,
        "field_out_of_range",
        param="structured_outputs.regex",
    )


def test_parallel_calls_are_named_as_ignored_without_tools(http: httpx.Client) -> None:
    call = {"model": MODEL, "messages": CHAT, "max_tokens": 4}
    for parallel, header in ((False, "parallel_tool_calls"), (True, None)):
        answer = http.post("/v1/chat/completions", json={**call, "parallel_tool_calls": parallel})
        assert answer.headers.get("X-Djinn-Ignored") == header
