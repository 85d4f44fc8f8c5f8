"""What `generate` refuses, and that it names the field and changes nothing."""

from __future__ import annotations

import httpx
import pytest

from tests.errors import assert_error
from tests.routers.generating import PROMPT


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"min_tokens": 2**31}, "min_tokens"),
        ({"top_k": 2**31}, "top_k"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        *(({"logit_bias": {key: 1}}, f"logit_bias.{key}") for key in ("05", "-5", "٥", "x", "9" * 10)),
        ({"logprobs": 21}, "logprobs"),
        ({"token_ids": [512]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids.0"),
        ({"token_ids": "5"}, "token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"token_ids": None, "messages": []}, "messages"),
        ({"token_ids": None, "messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        ({"token_ids": None, "messages": [{"role": "user", "content": "", "mood": 1}]}, "messages.0.mood"),
        ({"beam_width": 2}, "beam_width"),
    ],
)
def test_a_bad_field_is_named(http: httpx.Client, session: str, body: dict[str, object], param: str) -> None:
    response = http.post(f"{session}/generate", json={**PROMPT, **body})
    message = assert_error(response, 422, "field_out_of_range", param=param)
    assert param in message
    assert http.get(session).json()["tokens"] == 0


@pytest.mark.parametrize(("extra", "param"), [({}, None), ({"prompt": "a", "token_ids": [5]}, "token_ids")])
def test_exactly_one_kind_of_input_is_taken(
    http: httpx.Client, session: str, extra: dict[str, object], param: str | None
) -> None:
    response = http.post(f"{session}/generate", json={"max_tokens": 1, **extra})
    message = assert_error(response, 422, "field_out_of_range", param=param)
    assert "exactly one of prompt, messages and token_ids" in message


def test_an_empty_session_cannot_go_on_from_nothing(http: httpx.Client, session: str) -> None:
    response = http.post(f"{session}/generate", json={"token_ids": []})
    assert "at least 1 token" in assert_error(response, 422, "field_out_of_range", param="token_ids")


def test_too_many_tokens_are_refused_with_the_numbers(http: httpx.Client, session: str) -> None:
    response = http.post(f"{session}/generate", json={**PROMPT, "max_tokens": 1021})
    message = assert_error(response, 400, "context_length_exceeded", param="max_tokens")
    assert "1024" in message
    assert "4" in message
    assert "1021" in message


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(http: httpx.Client, session: str, field: str) -> None:
    text = "a" * 1_000_000
    given = text if field == "prompt" else [{"role": "user", "content": text}]
    message = assert_error(
        http.post(f"{session}/generate", json={field: given}), 400, "context_length_exceeded", param=field
    )
    assert "at least" in message
    assert "1024" in message
