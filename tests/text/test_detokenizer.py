"""Streamed text is the decoded text, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.text.detokenizer import Detokenizer, whole_pieces
from app.text.tokenizer import Tokens
from tests.text.vocabularies import BYTE_FALLBACK, MERGING, RANDOM


def _cut(data: st.DataObject, token_ids: list[int]) -> list[list[int]]:
    """`token_ids` in pieces of random length."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=6)))
    return [token_ids[lo:hi] for lo, hi in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]


def _stream(tokens: Tokens, pieces: list[list[int]]) -> str:
    stream = Detokenizer(tokens, after_text=False)
    return "".join([*(stream.push(piece) for piece in pieces), stream.flush()])


@pytest.mark.parametrize("tokens", [RANDOM, MERGING], ids=["bytes", "merges"])
@given(data=st.data())
def test_streamed_text_of_any_tokens_is_the_decoded_text(tokens: Tokens, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, tokens.vocab_size + 1), max_size=40))
    assert _stream(tokens, _cut(data, token_ids)) == tokens.decode(token_ids)


@pytest.mark.parametrize("tokens", [RANDOM, MERGING, BYTE_FALLBACK], ids=["bytes", "merges", "fallback"])
@given(text=st.text(), data=st.data())
def test_streamed_text_is_the_encoded_text(tokens: Tokens, text: str, data: st.DataObject) -> None:
    token_ids = tokens.encode(text, add_special_tokens=False)
    streamed = _stream(tokens, _cut(data, token_ids))
    assert streamed == tokens.decode(token_ids)


@given(token_ids=st.lists(st.integers(0, BYTE_FALLBACK.vocab_size), max_size=40))
@example(token_ids=[3 + 0x41, 3 + 0xFF])
def test_stream_survives_bytes_that_are_not_utf8(token_ids: list[int]) -> None:
    word = next(token_id for token_id in range(300) if BYTE_FALLBACK.token_text(token_id) == "ab")
    assert _stream(BYTE_FALLBACK, [[*token_ids, word]]).endswith("ab")


@given(prompt=st.text(alphabet="ab é🙂", min_size=1), text=st.text(alphabet="ab é🙂"))
def test_text_that_goes_on_keeps_its_first_space(prompt: str, text: str) -> None:
    before, after = (BYTE_FALLBACK.encode(part, add_special_tokens=False) for part in (prompt, prompt + text))
    if after[: len(before)] == before:
        stream = Detokenizer(BYTE_FALLBACK, after_text=True)
        shown = stream.push(after[len(before) :]) + stream.flush()
        assert BYTE_FALLBACK.decode(before) + shown == BYTE_FALLBACK.decode(after)


def test_incomplete_character_is_held_back_until_it_is_whole() -> None:
    stream = Detokenizer(RANDOM, after_text=False)
    assert [stream.push([byte]) for byte in "é€".encode()] == ["", "é", "", "", "€"]
    assert stream.flush() == ""


def test_flush_shows_what_is_left_of_a_character() -> None:
    stream = Detokenizer(RANDOM, after_text=False)
    assert stream.push(list("a€".encode()[:-1])) == "a"
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.flush() == ""


@pytest.mark.model
@given(data=st.data())
def test_streamed_text_of_any_tokens_of_smollm_is_the_decoded_text(smollm: Tokens, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, 49_151), max_size=40))
    assert _stream(smollm, _cut(data, token_ids)) == smollm.decode(token_ids)


@pytest.mark.parametrize("tokens", [RANDOM, MERGING], ids=["bytes", "merges"])
@given(data=st.data())
def test_the_pieces_of_a_history_make_up_its_text(tokens: Tokens, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, tokens.vocab_size + 1), max_size=40))
    pieces = whole_pieces(tokens, token_ids)
    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == tokens.decode(token_ids, skip_special_tokens=False)


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    assert whole_pieces(RANDOM, list("aé".encode())) == ["a", "", "é"]
    assert whole_pieces(RANDOM, [*b"a", 0xC3]) == ["a", "\N{REPLACEMENT CHARACTER}"]
