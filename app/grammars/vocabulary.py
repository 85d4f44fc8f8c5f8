"""A model's vocabulary as llguidance reads it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from app.model_store.tokenizer import eos_token_ids, load_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from app.model_store.resolve import ResolvedModel


class Vocabulary:
    """Read at the first use, which takes about a second."""

    def __init__(self, model: ResolvedModel, size: int) -> None:
        """`size` is that of the logits, which may be more than the tokenizer has tokens."""
        self._model = model
        self._size = size

    @cached_property
    def arguments(self) -> tuple[str, int, list[int]]:
        """What llguidance's tokenizer is made from: the fast tokenizer as JSON, the size, tokens that end a text."""
        tokenizer = load_tokenizer(self._model)
        tokenizer.backend.no_padding()
        tokenizer.backend.no_truncation()
        return tokenizer.backend.to_str(), self._size, sorted(eos_token_ids(self._model, tokenizer))

    @cached_property
    def compiled(self) -> LLTokenizer:
        """The vocabulary as a tree of bytes."""
        from llguidance import LLTokenizer

        text, size, ends = self.arguments
        return LLTokenizer(text, n_vocab=size, eos_token=ends or None)
