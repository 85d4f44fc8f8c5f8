"""Answers in a form: `response_format` and `structured_outputs`, with the official SDK."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import jsonschema
import openai
import pytest

from tests.grammars.schemas import random_schema
from tests.openai.conftest import MODEL

CHAT: Any = [{"role": "user", "content": "Hello"}]
SCHEMAS = [random_schema(seed) for seed in range(100, 102)]


def ask(sdk: Any, **fields: Any) -> list[str]:
    """Texts of the choices, all of which have stopped by themselves."""
    asked = {"model": MODEL, "messages": CHAT, "seed": 4, "max_tokens": 700, **fields}
    answer = sdk.chat.completions.create(**asked)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * len(answer.choices)
    return [choice.message.content or "" for choice in answer.choices]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_every_choice_and_stream_matches_the_schema(sdk: Any, schema: dict[str, Any]) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    asked: Any = {"response_format": form, "model": MODEL, "messages": CHAT, "seed": 4, "max_tokens": 700}
    stream = sdk.chat.completions.create(**asked, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert [streamed] == ask(sdk, response_format=form)
    for text in ask(sdk, response_format=form, n=3):
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_a_json_object_is_one_and_choices_differ(sdk: Any) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 200, "response_format": {"type": "json_object"}}
    assert sdk.chat.completions.create(**asked).choices[0].message.content.startswith("{")
    assert len(set(ask(sdk, n=3, extra_body={"structured_outputs": {"regex": "[a-z]{12}"}}))) == 3


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-c]{3,5}x"}, "[a-c]{3,5}x"),
        ({"choice": ["yes", "no", 'it\'s "so"']}, 'yes|no|it\'s "so"'),
        ({"grammar": 'start: "a" ("b" | "c") "d"'}, "a[bc]d"),
        ({"json": {"type": "integer", "minimum": 7, "maximum": 9}}, "[789]"),
        ({"json": '{"enum": [1, "é"]}', "regex": None}, '1|"é"'),
    ],
)
def test_the_forms_of_vllm(sdk: Any, form: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, ask(sdk, extra_body={"structured_outputs": form, "ignore_eos": True})[0])
    completion = sdk.completions.create(
        model=MODEL, prompt="x", max_tokens=100, extra_body={"structured_outputs": form, "ignore_eos": True}
    )
    assert re.fullmatch(pattern, completion.choices[0].text)
    assert completion.choices[0].finish_reason == "stop"


def test_too_few_tokens_end_the_answer_as_length(sdk: Any) -> None:
    answer = sdk.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=5, extra_body={"structured_outputs": {"regex": "a{30}"}}
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("aaaaa", "length")


def test_a_grammar_that_takes_long_to_compile_stalls_no_other_call(sdk: Any) -> None:
    """It would take half a minute."""
    ask(sdk, extra_body={"structured_outputs": {"regex": "warm"}})
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(9000)}}
    refused: list[openai.APIStatusError] = []

    def send() -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(sdk, extra_body={"structured_outputs": {"json": schema}})
        refused.append(caught.value)

    slow = threading.Thread(target=send)
    slow.start()
    longest = 0.0
    while slow.is_alive():
        began = time.monotonic()
        sdk.completions.create(model=MODEL, prompt="x", max_tokens=4)
        longest = max(longest, time.monotonic() - began)
    assert "structured_outputs.json" in refused[0].message
    assert longest < 5
