"""`/v1/embeddings`, against Transformers on the same weights. `/v1/models`, `/tokenize` and `/detokenize`."""

from typing import Any

import httpx
import pytest
import torch

from app.openai.models import tokenized_limit
from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference

TEXTS = ["a cat", "Grüße an alle Hunde", "x"]


def expected(reference: Reference, token_ids: list[int], *, pooling: str, layer: int | None) -> torch.Tensor:
    """The pooled vector `[hidden]`, not normalized. Transformers' last hidden state is the one after the final norm."""
    with torch.inference_mode():
        states = reference.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    found: torch.Tensor = states[-1 if layer is None else layer + 1][0]
    return found[-1] if pooling == "last" else found.mean(0)


@pytest.mark.parametrize("layer", [None, 0, 2])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_hidden_states_of_transformers(
    sdk: Any, reference: Reference, pooling: str, layer: int | None
) -> None:
    texts = [*TEXTS, "long " * 150]  # of more tokens than a step has
    extra: dict[str, Any] = {"pooling": pooling, "layer": layer}
    answer = sdk.embeddings.create(model=MODEL, input=texts, extra_body=extra)
    raw = sdk.embeddings.create(
        model=MODEL, input=texts, encoding_format="float", extra_body={**extra, "normalize": False}
    )
    assert [each.index for each in answer.data] == [0, 1, 2, 3]
    for text, unit, vector in zip(texts, answer.data, raw.data, strict=True):
        wanted = expected(reference, reference.encode(text), pooling=pooling, layer=layer)
        torch.testing.assert_close(torch.tensor(vector.embedding), wanted, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(torch.tensor(unit.embedding), wanted / wanted.norm(), rtol=1e-3, atol=1e-5)


def test_an_input_may_come_in_four_forms_and_a_vector_be_shortened(sdk: Any, reference: Reference) -> None:
    ids = [reference.encode(text) for text in TEXTS]
    forms: list[Any] = [TEXTS, ids, TEXTS[0], ids[0]]
    several, of_ids, one, of_one = (sdk.embeddings.create(model=MODEL, input=form) for form in forms)
    texts, tokens, text, token = (
        torch.tensor([each.embedding for each in answer.data]) for answer in (several, of_ids, one, of_one)
    )
    torch.testing.assert_close(texts, tokens)
    torch.testing.assert_close(text, texts[:1])
    torch.testing.assert_close(token, texts[:1])
    assert several.usage.prompt_tokens == several.usage.total_tokens == sum(map(len, ids))
    assert (one.model, one.object, one.data[0].object) == (MODEL, "list", "embedding")
    sdk._strict_response_validation = True
    [told] = sdk.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float").data
    assert told.embedding == pytest.approx(one.data[0].embedding)
    sdk._strict_response_validation = False  # its types have no base64, which it asks for by itself
    [short] = sdk.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=5).data
    first = torch.tensor(one.data[0].embedding[:5])
    torch.testing.assert_close(torch.tensor(short.embedding), first / first.norm())


def test_a_call_of_many_inputs_leaves_no_session_and_refuses_what_cannot_be(http: httpx.Client) -> None:
    before = http.get("/v1/memory").json()["sessions"]
    many = http.post("/v1/embeddings", json={"model": MODEL, "input": [[5, number] for number in range(100)]})
    assert [each["index"] for each in many.json()["data"]] == list(range(100))
    for body, param in (
        ({"layer": 4}, "layer"),
        ({"dimensions": 10_000}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": [[1], [100_000]]}, "input.1"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ):
        answer = http.post("/v1/embeddings", json={"model": MODEL, "input": "x", **body})
        assert_error(answer, 400, "field_out_of_range", param=param)
    too_long = http.post("/v1/embeddings", json={"model": MODEL, "input": [[1], [5] * 1025]})
    assert_error(too_long, 400, "context_length_exceeded", param="input.1")
    assert http.post("/v1/embeddings", json={"model": "gpt-4o", "input": "x"}).status_code == 404
    assert http.get("/v1/memory").json()["sessions"] == before


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
