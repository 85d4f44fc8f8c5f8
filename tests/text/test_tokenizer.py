from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.domain.errors import MalformedRequest
from app.model_store.byte_tokenizer import byte_tokenizer
from app.model_store.errors import BrokenModel
from app.model_store.model_tokenizer import ModelTokenizer
from app.model_store.resolve import ResolvedModel
from app.model_store.shapes import shape_config
from app.text.tokenizer import Tokens, load_tokens
from tests.text.vocabularies import MERGING, RANDOM


@pytest.mark.parametrize("tokens", [RANDOM, MERGING], ids=["bytes", "merges"])
@given(text=st.text())
def test_token_bytes_make_up_the_text(tokens: Tokens, text: str) -> None:
    token_ids = tokens.encode(text, add_special_tokens=False)
    assert b"".join(tokens.token_bytes(token_id) for token_id in token_ids) == text.encode()


def test_token_text_of_part_of_a_character() -> None:
    assert RANDOM.token_text(ord("a")) == "a"
    assert RANDOM.token_text(0xE2) == "\N{REPLACEMENT CHARACTER}"
    assert RANDOM.token_bytes(0xE2) == b"\xe2"
    assert RANDOM.token_bytes(10**6) == b""


def test_chat_is_rendered_in_the_template() -> None:
    messages = [{"role": "user", "content": "hi"}]
    rendered = RANDOM.render_chat(messages)
    assert (
        RANDOM.decode(rendered, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    messages.append({"role": "assistant", "content": "Hello"})
    opened = RANDOM.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert RANDOM.decode(opened, skip_special_tokens=False).endswith("assistant\nHello")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": ["parts"]}], "list"),
        ([{"content": "hi"}], "role"),
    ],
)
def test_messages_that_the_template_rejects(messages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(MalformedRequest, match=says) as caught:
        RANDOM.render_chat(messages)
    assert caught.value.param == "messages"


def test_model_without_a_chat_template() -> None:
    with pytest.raises(MalformedRequest, match="no chat template"):
        MERGING.render_chat([{"role": "user", "content": "hi"}])


def test_a_template_without_end_rejects_the_messages() -> None:
    tokenizer = byte_tokenizer(300)
    tokenizer.chat_template = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
    with pytest.raises(MalformedRequest, match="recursion") as caught:
        Tokens(ModelTokenizer.of(tokenizer), frozenset()).chat_text([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(MalformedRequest, match="character 2"):
        RANDOM.encode("ab\ud800", add_special_tokens=False)


def test_decoder_of_another_kind_is_refused() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(BrokenModel, match="neither byte-level"):
        Tokens(ModelTokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend)), frozenset())


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BrokenModel, match="tokenizer"):
        load_tokens(ResolvedModel("m", shape_config("tiny-llama"), tmp_path, 0))


@pytest.mark.model
class TestSmolLM:
    def test_special_tokens(self, smollm: Tokens) -> None:
        assert smollm.encode("<|im_start|><|im_end|>", add_special_tokens=True) == [1, 2]
        assert smollm.eos_token_ids == {2}
        assert (smollm.vocab_size, smollm.bos_token_id) == (49_152, 1)

    def test_agrees_with_transformers(self, smollm: Tokens, smollm_folder: Path) -> None:
        reference = AutoTokenizer.from_pretrained(smollm_folder)
        text = "Déjà vu in 2024:  3 + 4 = 7\n\n東京 🙂"
        token_ids = smollm.encode(text, add_special_tokens=False)
        assert token_ids == reference.encode(text, add_special_tokens=False)
        assert smollm.decode(token_ids) == text
        messages = [{"role": "user", "content": text}]
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert smollm.render_chat(messages) == expected
