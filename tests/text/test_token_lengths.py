"""A text is refused for its length alone only if its tokens would not fit either."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from app.domain.errors import ContextTooLong
from app.text.token_lengths import TextLimit, TokenLengths
from app.text.tokenizer import Tokens
from tests.text.vocabularies import BYTE_FALLBACK, MERGING, RANDOM

TEXTS = st.text(st.sampled_from("ab theçé🙂思<|end|>東\n\t̀"), max_size=60)


def is_refused(lengths: TokenLengths, text: str, most: int) -> bool:
    try:
        lengths.check(text, TextLimit("prompt", most))
    except ContextTooLong:
        return True
    return False


@pytest.mark.parametrize("tokens", [RANDOM, MERGING, BYTE_FALLBACK], ids=["bytes", "merging", "byte fallback"])
@given(text=TEXTS)
@example(text="the cat sat on the mat" * 20)
def test_no_text_that_fits_is_refused(tokens: Tokens, text: str) -> None:
    count = len(tokens.encode(text, add_special_tokens=False))
    assert tokens.encode(text, add_special_tokens=False, limit=TextLimit("prompt", count)) is not None


@pytest.mark.model
@given(text=st.text(max_size=60))
@example(text=" " * 4000)
@example(text="e\u0301" * 4000)
@example(text="\x04\x13a\U00040000\U000fffff" * 1000)
def test_no_text_that_fits_a_real_model_is_refused(smollm: Tokens, text: str) -> None:
    count = len(smollm.encode(text, add_special_tokens=False))
    assert smollm.encode(text, add_special_tokens=False, limit=TextLimit("prompt", count)) is not None


@pytest.mark.model
def test_a_real_model_refuses_a_text_that_cannot_fit_by_its_length(smollm: Tokens) -> None:
    """Some bytes have no token in its vocabulary: they count for nothing."""
    with pytest.raises(ContextTooLong, match="are at least"):
        smollm.encode("a b " * 100_000, add_special_tokens=False, limit=TextLimit("prompt", 1000))
    assert smollm.encode("\x04" * 100_000 + "a", add_special_tokens=False, limit=TextLimit("prompt", 1))


def test_a_text_that_cannot_fit_is_refused_by_name() -> None:
    with pytest.raises(
        ContextTooLong, match=r"prompt.2 is too long: .* 100000 characters .* context of 64 tokens"
    ) as caught:
        RANDOM.encode("a" * 100_000, add_special_tokens=False, limit=TextLimit("prompt.2", 64))
    assert caught.value.param == "prompt.2"


def make(**parts: object) -> Tokenizer:
    """A byte-level tokenizer with other parts than the usual."""
    alphabet = {character: index for index, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def test_where_one_token_may_stand_for_any_text_none_is_refused() -> None:
    swallows = make()
    swallows.add_tokens([AddedToken("<x>", rstrip=True)])
    unknown = Tokenizer(models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True))
    removes = make(pre_tokenizer=pre_tokenizers.WhitespaceSplit())
    strips = make(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]))
    assert is_refused(TokenLengths(make()), "a" * 65, 64)
    assert not any(is_refused(TokenLengths(each), "a" * 10_000, 1) for each in (swallows, unknown, removes, strips))


def test_a_normalizer_that_composes_is_allowed_for() -> None:
    composes = TokenLengths(make(normalizer=normalizers.NFC()))
    assert not is_refused(composes, "e\u0301" * 100, 100)
    assert is_refused(composes, "a" * 401, 100)
