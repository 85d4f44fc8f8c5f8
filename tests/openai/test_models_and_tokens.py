"""`/v1/models`, `/tokenize` and `/detokenize`."""

from typing import Any

import httpx
import pytest

from app.openai.models import tokenized_limit
from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference

CHAT = [{"role": "user", "content": "Hi"}]
OPENED = {"add_generation_prompt": True}


def test_the_served_model_is_listed(sdk: Any) -> None:
    [model] = sdk.models.list()
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "djinn")
    assert sdk.models.retrieve(MODEL) == model


def test_tokens_are_those_of_transformers(http: httpx.Client, reference: Reference) -> None:
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": "Grüße", "return_token_strs": True}).json()
    expected = reference.encode("Grüße")
    assert answer["tokens"] == expected
    assert answer["count"] == len(expected) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1024
    bare = http.post("/tokenize", json={"prompt": "Grüße", "add_special_tokens": False}).json()
    assert bare["tokens"] == expected[1:]
    assert bare["token_strs"] is None
    assert http.post("/detokenize", json={"tokens": bare["tokens"]}).json() == {"prompt": "Grüße"}


def test_a_chat_is_tokenized_with_the_models_template(http: httpx.Client, reference: Reference) -> None:
    assert http.post("/tokenize", json={"messages": CHAT}).json()["tokens"] == reference.chat(CHAT)
    closed = http.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False}).json()["tokens"]
    assert closed == reference.chat(CHAT)[: len(closed)] != reference.chat(CHAT)
    left_open = http.post("/tokenize", json={"messages": CHAT, "continue_final_message": True}).json()["tokens"]
    assert reference.tokenizer.decode(left_open).endswith("Hi")
    thinks = http.post("/tokenize", json={"messages": CHAT, "reasoning_effort": "high"})
    assert thinks.headers["x-djinn-ignored"] == "reasoning_effort"  # as for the same chat


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "messages"),
        ("/tokenize", {"prompt": "x"} | OPENED, "add_generation_prompt"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "reasoning_effort": "low"}, "reasoning_effort"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True} | OPENED, "continue_final_message"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 131_073}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(http: httpx.Client, path: str, body: Any, param: str | None) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_text_that_would_take_seconds_to_tokenize_is_refused(http: httpx.Client, field: str) -> None:
    text = "a " * (1 << 19) + "a"
    answer = http.post("/tokenize", json={field: text if field == "prompt" else [{"role": "user", "content": text}]})
    assert "at most 1048576 are tokenized" in assert_error(answer, 400, "field_out_of_range", param=field)


def test_a_text_that_fills_a_long_context_can_be_counted() -> None:
    assert tokenized_limit("prompt", 1 << 20).most >= 5 << 20


def test_another_models_tokens_are_not_to_be_had_here(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"model": "gpt-4o", "prompt": "x"}).status_code == 404
    assert http.post("/detokenize", json={"model": "gpt-4o", "tokens": [1]}).status_code == 404
