"""Conversations without tools, as the official SDK sends and reads them."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from tests.anthropic.conftest import ASK, MODEL, prompt_of, text_of

GREEDY: Any = {"extra_body": {"temperature": 0, "ignore_eos": True}}


def test_the_answer_is_what_a_chat_with_these_messages_has(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    system, said = "Be kind.", [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    messages: Any = [*said, {"role": "user", "content": "And now?"}]
    answer = sdk.messages.create(**{**ASK, "messages": messages}, system=system, **GREEDY)
    chat = http.post(
        "/v1/chat/completions",
        json={
            "model": MODEL,
            "messages": [{"role": "system", "content": system}, *messages],
            "max_tokens": ASK["max_tokens"],
            "temperature": 0,
            "ignore_eos": True,
        },
    ).json()
    assert text_of(answer) == chat["choices"][0]["message"]["content"]
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", MODEL, "max_tokens")
    assert answer.id.startswith("msg_")
    assert prompt_of(answer.usage) == chat["usage"]["prompt_tokens"]
    assert answer.usage.output_tokens == ASK["max_tokens"]


def test_a_stream_adds_up_to_the_whole_answer(sdk: anthropic.Anthropic) -> None:
    ask = {**ASK, "max_tokens": 100}
    whole = sdk.messages.create(**ask, **GREEDY)
    with sdk.messages.stream(**ask, **GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert text_of(final) == "".join(pieces) == text_of(whole)
    assert len(pieces) > 3
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert prompt_of(final.usage) == prompt_of(whole.usage)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_events_come_in_the_documented_order(http: httpx.Client) -> None:
    response = http.post("/v1/messages", json={**ASK, "stream": True, "temperature": 0, "ignore_eos": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    names, events = [], []
    for part in response.text.strip().split("\n\n"):
        name, data = part.split("\n")
        names.append(name.removeprefix("event: "))
        events.append(json.loads(data.removeprefix("data: ")))
    assert names == [event["type"] for event in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    started = events[0]["message"]
    assert (started["content"], started["stop_reason"], started["usage"]["output_tokens"]) == ([], None, 0)
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[0]["message"]["usage"] | {"output_tokens": ASK["max_tokens"]} == events[-2]["usage"]


def test_the_stop_sequence_that_matched_is_named(sdk: anthropic.Anthropic) -> None:
    full = text_of(sdk.messages.create(**{**ASK, "max_tokens": 40}, **GREEDY))
    stop = full[len(full) // 2 :][:3]
    asked: Any = {**ASK, "max_tokens": 40, "stop_sequences": ["never said", stop]}
    whole = sdk.messages.create(**asked, **GREEDY)
    with sdk.messages.stream(**asked, **GREEDY) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
        assert text_of(answer) == full[: full.index(stop)]


def test_a_model_that_has_said_all_ends_its_turn(sdk: anthropic.Anthropic) -> None:
    end = {"stop_token_ids": list(range(64)), "logit_bias": {str(token): 100 for token in range(64)}}
    answer = sdk.messages.create(**ASK, extra_body=end)
    assert (answer.stop_reason, answer.stop_sequence, answer.usage.output_tokens) == ("end_turn", None, 1)


def test_no_tokens_only_compute_the_prompt(sdk: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "warm this up, please, for the call that follows"}]
    warm = sdk.messages.create(model=MODEL, max_tokens=0, messages=messages)
    assert (warm.content, warm.usage.output_tokens, warm.usage.cache_read_input_tokens) == ([], 0, 0)
    assert (sdk.messages.create(model=MODEL, max_tokens=1, messages=messages).usage.cache_read_input_tokens or 0) > 16


def test_an_answer_continues_a_last_message_of_the_assistant(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The best answer is ("}]
    tokens = http.post(
        "/tokenize", json={"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    ).json()["tokens"]
    goes_on = http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": tokens, "max_tokens": 12, "temperature": 0, "ignore_eos": True},
    ).json()
    answer = sdk.messages.create(**{**ASK, "messages": messages}, **GREEDY)
    assert text_of(answer) == goes_on["choices"][0]["text"]
    assert prompt_of(answer.usage) == len(tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be kind."},
        {"system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]},
        {"tools": [{"name": "now", "description": "the time", "input_schema": {"type": "object"}}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"thinking": {"type": "disabled"}},
    ],
)
def test_counted_tokens_are_those_of_the_call(sdk: anthropic.Anthropic, fields: Any) -> None:
    asked = {"model": MODEL, "messages": ASK["messages"], **fields}
    counted = sdk.messages.count_tokens(**asked).input_tokens
    assert counted == prompt_of(sdk.messages.create(**asked, max_tokens=1).usage)


def test_cached_tokens_are_those_whose_kv_was_there(sdk: anthropic.Anthropic) -> None:
    shared = "A long beginning that both of these calls have in common, and no other. " * 2
    usages = []
    for question in ("First?", "Second, which is another?"):
        messages: Any = [{"role": "user", "content": shared + question}]
        usages.append(sdk.messages.create(model=MODEL, max_tokens=1, messages=messages).usage)
        assert prompt_of(usages[-1]) == sdk.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    assert usages[0].cache_read_input_tokens == 0
    read = usages[1].cache_read_input_tokens or 0
    assert len(shared) - 16 <= read <= prompt_of(usages[1]) - len("Second, which is another?")


def test_a_bound_call_reads_what_its_session_has(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    bound: Any = {"extra_headers": {"X-Session-ID": "reader-of-kv"}}
    first = sdk.messages.with_raw_response.create(**ASK, metadata={"user_id": "ann"}, **bound)
    answer = first.parse()
    messages: Any = [*ASK["messages"], {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]
    second = sdk.messages.with_raw_response.create(**{**ASK, "messages": messages}, **bound)
    assert first.headers["x-session-id"] == second.headers["x-session-id"]
    usage = second.parse().usage
    assert (usage.cache_read_input_tokens or 0) >= prompt_of(answer.usage)
    session = http.get(f"/v1/sessions/{first.headers['x-session-id']}").json()
    assert session["metadata"] == {"user": "ann"}
    read = [each.cache_read_input_tokens or 0 for each in (answer.usage, usage)]
    assert session["usage"]["cached_tokens"] == sum(read)


def test_an_answer_has_the_asked_form(sdk: anthropic.Anthropic) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    answer = sdk.messages.create(**{**ASK, "max_tokens": 200}, output_config=form)
    assert json.loads(text_of(answer))["a"] in (1, 2)
    assert answer.stop_reason == "end_turn"


def test_the_beta_client_is_served_too(sdk: anthropic.Anthropic) -> None:
    assert 0 < sdk.beta.messages.create(**ASK).usage.output_tokens <= ASK["max_tokens"]


def test_fields_without_effect_are_named(http: httpx.Client) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        **ASK,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello", **cached}]}],
        "tools": [{"name": "now", "input_schema": {"type": "object"}, **cached}],
        "service_tier": "auto",
        "unheard_of": 1,
        **cached,
    }
    response = http.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 200
    assert set(response.headers["x-djinn-ignored"].split(", ")) == {
        "cache_control",
        "unheard_of",
        "messages.0.content.0.cache_control",
        "tools.0.cache_control",
    }
