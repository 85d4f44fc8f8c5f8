"""A model's tokenizer, apart from the library that has read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What the tokenizers library does not know of a tokenizer."""

    special_tokens: Mapping[str, str]
    """`bos_token` and the like: variables of the chat template."""
    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: str | Mapping[str, str] | None
    """Of several, each has a name."""
    response_template: dict[str, Any] | None
    """How the checkpoint says that its answers are read."""


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """`backend` cuts text into tokens and joins them."""

    backend: Tokenizer
    facts: TokenizerFacts

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> ModelTokenizer:
        """The tokenizer that Transformers has read."""
        facts = TokenizerFacts(
            special_tokens=dict(tokenizer.special_tokens_map),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            chat_template=tokenizer.chat_template,
            response_template=getattr(tokenizer, "response_template", None),
        )
        return cls(tokenizer.backend_tokenizer, facts)
