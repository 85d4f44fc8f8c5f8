from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from app.model_store.byte_tokenizer import BOS_ID, EOS_ID, IM_END_ID, IM_START_ID, byte_alphabet, byte_tokenizer

SPECIAL_TEXTS = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
TOKENIZER = byte_tokenizer(512)


def test_alphabet_is_that_of_the_tokenizers_library() -> None:
    assert sorted(byte_alphabet()) == sorted(ByteLevel.alphabet())


@given(st.text().filter(lambda text: not any(special in text for special in SPECIAL_TEXTS)))
def test_tokens_are_the_bytes_of_the_text(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert token_ids == list(text.encode())
    assert TOKENIZER.decode(token_ids) == text


def test_special_tokens_are_single() -> None:
    token_ids = TOKENIZER.encode("".join(SPECIAL_TEXTS), add_special_tokens=False)
    assert token_ids == [BOS_ID, EOS_ID, IM_START_ID, IM_END_ID]


def test_bos_is_added_on_request() -> None:
    assert TOKENIZER.encode("a") == [BOS_ID, ord("a")]


@pytest.mark.parametrize("vocab_size", [260, 512, 50_257])
def test_every_id_of_the_model_has_a_text_and_no_other(vocab_size: int) -> None:
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer(vocab_size)
    assert len(tokenizer) == vocab_size
    assert all(tokenizer.decode([token_id]) for token_id in range(vocab_size))
