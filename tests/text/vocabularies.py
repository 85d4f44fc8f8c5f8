"""Tokenizers of each kind, small and made here."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from app.model_store.model_tokenizer import ModelTokenizer
from app.model_store.resolve import ResolvedModel
from app.model_store.shapes import shape_config
from app.text.tokenizer import Tokens, load_tokens

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
