"""`/v1/chat/completions` through the official SDK, against Transformers."""

import math
from typing import Any

import pytest

from tests.openai.conftest import MODEL
from tests.openai.reference import Reference

CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a session?"}]
NO_EARLY_END = {"ignore_eos": True}


def content_of(answer: Any, index: int = 0) -> str:
    return str(answer.choices[index].message.content)


def test_the_greedy_answer_is_what_transformers_generates(sdk: Any, reference: Reference) -> None:
    prompt = reference.chat(CHAT)
    expected = reference.greedy(prompt, 24)
    answer = sdk.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_completion_tokens=24)
    assert content_of(answer) == reference.decode(expected)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 24)
    assert answer.usage.total_tokens == len(prompt) + 24
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.startswith("fp_")


def test_a_stream_is_the_plain_answer_in_pieces(sdk: Any) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "seed": 11, "max_tokens": 24, "extra_body": NO_EARLY_END}
    asked |= {"logprobs": True, "top_logprobs": 2}
    plain = sdk.chat.completions.create(**asked)
    chunks = list(sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    *with_choices, last = chunks
    assert with_choices[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in with_choices) == content_of(plain)
    scores = [chunk.choices[0].logprobs for chunk in with_choices]
    told = [entry for piece in scores if piece is not None for entry in piece.content or ()]
    assert told == plain.choices[0].logprobs.content
    reasons = [chunk.choices[0].finish_reason for chunk in with_choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {(last.id, last.created, MODEL)}
    assert all(chunk.usage is None for chunk in with_choices)
    assert last.choices == []
    assert last.usage.completion_tokens == plain.usage.completion_tokens == 24
    without = sdk.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3, stream=True)
    assert all("usage" not in chunk.model_fields_set and chunk.choices for chunk in without)


def test_logprobs_are_those_of_transformers(sdk: Any, reference: Reference) -> None:
    answer = sdk.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=8, logprobs=True, top_logprobs=5
    )
    logprobs = answer.choices[0].logprobs
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


@pytest.mark.parametrize(("seed", "same"), [(1, 1), (-1, 2**63 - 1), (2**63 + 7, 7), (-(10**40), -(10**40) % 2**63)])
def test_a_seed_of_any_size_is_a_seed(sdk: Any, seed: int, same: int) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 24, "n": 2}
    answer, mapped, other = (sdk.chat.completions.create(**asked, seed=each) for each in (seed, same, 2))
    for index in range(2):
        assert content_of(answer, index) == content_of(mapped, index) != content_of(other, index)


def test_choices_differ_and_can_be_had_again_with_the_seed(sdk: Any) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "n": 3, "seed": 4, "max_tokens": 16, "extra_body": NO_EARLY_END}
    answer = sdk.chat.completions.create(**asked)
    contents = [content_of(answer, index) for index in range(3)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(contents)) == 3
    streamed = ["", "", ""]
    for chunk in sdk.chat.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == contents
    assert answer.usage.completion_tokens == 48


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


@pytest.mark.parametrize(
    ("sent", "template"),
    [
        ([said("developer", "Be kind."), said("user", "Hi")], [said("system", "Be kind."), said("user", "Hi")]),
        ([said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], [said("user", "a\nb")]),
        (
            [said("assistant", "I look.", refusal=None), said("tool", "12:00", tool_call_id="c1")],
            [said("assistant", "I look."), said("user", "<tool_response>\n12:00\n</tool_response>")],
        ),
        (
            [said("assistant", None, refusal="I would rather not."), said("user", "Do")],
            [said("assistant", "I would rather not."), said("user", "Do")],
        ),
        (
            [said("assistant", [{"type": "text", "text": "Hm."}, {"type": "refusal", "refusal": "No."}])],
            [said("assistant", "Hm.\nNo.")],
        ),
    ],
    ids=["developer", "text parts", "tool results", "a refusal", "a refusal as a part"],
)
def test_every_form_of_message_reaches_the_template(sdk: Any, reference: Reference, sent: Any, template: Any) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=sent, temperature=0, max_tokens=8)
    assert content_of(answer) == reference.decode(reference.greedy(reference.chat(template), 8))


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1, "top_p": 0},
        {"temperature": 0, "logprobs": False, "top_logprobs": 0},
        {"temperature": 0, "max_tokens": 8, "max_completion_tokens": 8},
    ],
)
def test_what_clients_write_out_asks_for_the_greedy_answer(sdk: Any, reference: Reference, asked: Any) -> None:
    answer = sdk.chat.completions.create(**{"model": MODEL, "messages": CHAT, "max_tokens": 8, "seed": 7, **asked})
    assert content_of(answer) == reference.decode(reference.greedy(reference.chat(CHAT), 8))
    assert answer.choices[0].logprobs is None


def test_null_means_absent_and_harmless_fields_are_taken(sdk: Any) -> None:
    empty: Any = dict.fromkeys(
        ["stop", "seed", "n", "top_p", "temperature", "logit_bias", "tools", "tool_choice", "response_format", "stream"]
    )
    answer = sdk.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=2, user="u1", store=False, metadata={"run": "7"}, extra_body=empty
    )
    assert answer.metadata == {"run": "7"}
