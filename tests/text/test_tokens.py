"""Texts to tokens and back: streamed text is the decoded text, and no text is refused whose tokens would fit."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.domain.errors import ContextTooLong, MalformedRequest
from app.model_store.install import BrokenModel
from app.model_store.resolve import ResolvedModel
from app.model_store.saved import ModelTokenizer
from app.text.generation import Detokenizer, whole_pieces
from app.text.tokenizer import TextLimit, TokenLengths, Tokens, load_tokens
from tests.hugging_face import byte_tokenizer, shape_config

RANDOM = load_tokens(ResolvedModel("tiny-llama", shape_config("tiny-llama"), None, 0))
CORPUS = ["the cat sat on the mat", "naïve café déjà vu", "東京 🙂🙂 日本", "1999 2024"]


def _merging() -> Tokens:
    """A byte-level vocabulary with merges across the bytes of a character, as GPT-2, Llama 3 and SmolLM have."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<思>", special=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    return Tokens(ModelTokenizer.of(tokenizer), frozenset({0}))


def _byte_fallback() -> Tokens:
    """A vocabulary with a token for each byte beside its words, as Llama 2 and Mistral have."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcé", "▁a", "ab"]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    return Tokens(ModelTokenizer.of(tokenizer), frozenset({2}))


MERGING, BYTE_FALLBACK = _merging(), _byte_fallback()


@pytest.mark.parametrize("tokens", [RANDOM, MERGING], ids=["bytes", "merges"])
@given(text=st.text())
def test_token_bytes_make_up_the_text(tokens: Tokens, text: str) -> None:
    token_ids = tokens.encode(text, add_special_tokens=False)
    assert b"".join(tokens.token_bytes(token_id) for token_id in token_ids) == text.encode()


@pytest.mark.parametrize(
    ("messages", "says"), [([], "at least one message"), ([{"role": "user", "content": ["parts"]}], "list")]
)
def test_messages_that_the_template_rejects(messages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(MalformedRequest, match=says) as caught:
        RANDOM.render_chat(messages)
    assert caught.value.param == "messages"


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
    def test_agrees_with_transformers(self, smollm: Tokens, smollm_folder: Path) -> None:
        reference = AutoTokenizer.from_pretrained(smollm_folder)
        text = "Déjà vu in 2024:  3 + 4 = 7\n\n東京 🙂"
        token_ids = smollm.encode(text, add_special_tokens=False)
        assert token_ids == reference.encode(text, add_special_tokens=False)
        assert smollm.decode(token_ids) == text
        messages = [{"role": "user", "content": text}]
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert smollm.render_chat(messages) == expected


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
    assert stream.push([0xE2]) + stream.flush() == "\N{REPLACEMENT CHARACTER}"


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
