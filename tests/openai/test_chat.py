"""`/v1/chat/completions` through the official SDK, against Transformers."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.openai.conftest import MODEL
from tests.openai.reference import Reference

CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a session?"}]
NO_EARLY_END = {"ignore_eos": True}


def content_of(answer: ChatCompletion, index: int = 0) -> str:
    content = answer.choices[index].message.content
    assert content is not None
    return content


def test_the_greedy_answer_is_what_transformers_generates(sdk: openai.OpenAI, reference: Reference) -> None:
    prompt = reference.chat(CHAT)
    expected = reference.greedy(prompt, 24)
    answer = sdk.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_completion_tokens=24)
    assert content_of(answer) == reference.decode(expected)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 24)
    assert answer.usage.total_tokens == len(prompt) + 24
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint
    assert answer.system_fingerprint.startswith("fp_")


def test_a_stream_is_the_plain_answer_in_pieces(sdk: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "seed": 11, "max_tokens": 24, "extra_body": NO_EARLY_END}
    plain = sdk.chat.completions.create(**asked)
    chunks: list[ChatCompletionChunk] = list(
        sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    *with_choices, last = chunks
    assert with_choices[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in with_choices) == content_of(plain)
    reasons = [chunk.choices[0].finish_reason for chunk in with_choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {(last.id, last.created, MODEL)}
    assert all(chunk.usage is None for chunk in with_choices)
    assert last.choices == []
    assert last.usage is not None
    assert plain.usage is not None
    assert last.usage.completion_tokens == plain.usage.completion_tokens == 24


def test_a_stream_without_options_has_no_usage(sdk: openai.OpenAI) -> None:
    chunks = sdk.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3, stream=True)
    assert all("usage" not in chunk.model_fields_set and chunk.choices for chunk in chunks)


def test_logprobs_are_those_of_transformers(sdk: openai.OpenAI, reference: Reference) -> None:
    answer = sdk.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=8, logprobs=True, top_logprobs=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    prompt = reference.chat(CHAT)
    generated = reference.greedy(prompt, 8)
    expected = reference.logprobs(prompt + generated)[len(prompt) - 1 : -1]
    assert len(logprobs.content) == 8
    for entry, token_id, row in zip(logprobs.content, generated, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)
        assert entry.token == entry.top_logprobs[0].token
        assert sum(math.exp(each.logprob) for each in entry.top_logprobs) <= 1 + 1e-6
    utf8 = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert utf8.decode(errors="replace") == content_of(answer)


def test_streamed_logprobs_are_the_plain_ones(sdk: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "seed": 5, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    plain = sdk.chat.completions.create(**asked).choices[0].logprobs
    assert plain is not None
    pieces = [chunk.choices[0].logprobs for chunk in sdk.chat.completions.create(**asked, stream=True)]
    streamed = [entry.model_dump() for piece in pieces if piece is not None for entry in piece.content or ()]
    assert streamed == [entry.model_dump() for entry in plain.content or ()]


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(sdk: openai.OpenAI) -> None:
    answers = [sdk.chat.completions.create(model=MODEL, messages=CHAT, seed=seed, max_tokens=24) for seed in (1, 1, 2)]
    assert content_of(answers[0]) == content_of(answers[1]) != content_of(answers[2])


@pytest.mark.parametrize(("seed", "same"), [(-1, 2**63 - 1), (2**63 + 7, 7), (-(10**40), -(10**40) % 2**63)])
def test_a_seed_of_any_size_is_a_seed(sdk: openai.OpenAI, seed: int, same: int) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 24, "n": 2}
    answer, mapped = (sdk.chat.completions.create(**asked, seed=each) for each in (seed, same))
    assert content_of(answer) == content_of(mapped)
    assert content_of(answer, 1) == content_of(mapped, 1)


def test_choices_differ_and_can_be_had_again_with_the_seed(sdk: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "n": 3, "seed": 4, "max_tokens": 16, "extra_body": NO_EARLY_END}
    answer = sdk.chat.completions.create(**asked)
    contents = [content_of(answer, index) for index in range(3)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(contents)) == 3
    streamed = ["", "", ""]
    for chunk in sdk.chat.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == contents
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 48


@pytest.mark.parametrize(
    ("sent", "template"),
    [
        (
            [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
            [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [{"role": "user", "content": "a\nb"}],
        ),
        (
            [
                {"role": "user", "content": "What time is it?"},
                {"role": "assistant", "content": "I look.", "refusal": None},
                {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
            ],
            [
                {"role": "user", "content": "What time is it?"},
                {"role": "assistant", "content": "I look."},
                {"role": "user", "content": "<tool_response>\n12:00\n</tool_response>"},
            ],
        ),
        ([{"role": "narrator", "content": "Night falls."}], [{"role": "narrator", "content": "Night falls."}]),
        (
            [
                {"role": "assistant", "content": None, "refusal": "I would rather not."},
                {"role": "user", "content": "Do"},
            ],
            [{"role": "assistant", "content": "I would rather not."}, {"role": "user", "content": "Do"}],
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "Hm."}, {"type": "refusal", "refusal": "No."}],
                },
                {"role": "user", "content": "Please."},
            ],
            [{"role": "assistant", "content": "Hm.\nNo."}, {"role": "user", "content": "Please."}],
        ),
        ([{"role": "user", "content": ""}], [{"role": "user", "content": ""}]),
    ],
    ids=["developer", "text parts", "tool results", "a role of its own", "a refusal", "a refusal as a part", "no text"],
)
def test_every_form_of_message_reaches_the_template(
    sdk: openai.OpenAI, reference: Reference, sent: Any, template: list[dict[str, Any]]
) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=sent, temperature=0, max_tokens=8)
    assert content_of(answer) == reference.decode(reference.greedy(reference.chat(template), 8))


def test_an_answer_can_be_sent_back_as_it_came(sdk: openai.OpenAI, reference: Reference) -> None:
    first = sdk.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=8)
    message: Any = first.choices[0].message.model_dump()
    more: Any = {"role": "user", "content": "Go on."}
    again = sdk.chat.completions.create(model=MODEL, messages=[*CHAT, message, more], temperature=0, max_tokens=8)
    chat = [*CHAT, {"role": "assistant", "content": content_of(first)}, more]
    assert content_of(again) == reference.decode(reference.greedy(reference.chat(chat), 8))


def test_null_means_absent_and_harmless_fields_are_taken(sdk: openai.OpenAI) -> None:
    empty: Any = dict.fromkeys(
        ["stop", "seed", "n", "top_p", "temperature", "logit_bias", "tools", "tool_choice", "response_format", "stream"]
    )
    answer = sdk.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=2, user="u1", store=False, metadata={"run": "7"}, extra_body=empty
    )
    assert answer.metadata == {"run": "7"}


NEUTRAL: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}},
    {"tools": []},
    {"tool_choice": "none"},
    {"tool_choice": "auto"},
    {"parallel_tool_calls": False},
    {"service_tier": "auto"},
    {"service_tier": "default"},
    {"modalities": ["text"]},
    {"prediction": None},
    {"store": False},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
]


@pytest.mark.parametrize("neutral", NEUTRAL, ids=lambda fields: "-".join(f"{key}-{fields[key]}" for key in fields))
def test_a_value_that_asks_for_nothing_changes_nothing(sdk: openai.OpenAI, neutral: dict[str, Any]) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 4}
    plain, answer = sdk.chat.completions.create(**asked), sdk.chat.completions.create(**asked, **neutral)
    if "stream" in neutral:
        said = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        said = content_of(answer)
    assert said == content_of(plain)


async def test_many_async_calls_get_each_their_own_answer(async_sdk: openai.AsyncOpenAI, reference: Reference) -> None:
    chats: list[Any] = [[{"role": "user", "content": f"Number {number}"}] for number in range(8)]
    answers = await asyncio.gather(
        *(async_sdk.chat.completions.create(model=MODEL, messages=chat, temperature=0, max_tokens=12) for chat in chats)
    )
    for chat, answer in zip(chats, answers, strict=True):
        assert content_of(answer) == reference.decode(reference.greedy(reference.chat(chat), 12))
