"""The tokenizer and the chat template of a GGUF file, as Transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
"""`tokenizer.ggml.pre` values for GPT-2's split with every digit alone (llama.cpp, src/llama-vocab.cpp)."""
_PLAIN_GPT2 = frozenset({"", "default", "gpt-2"})


def convert_tokenizer(source: Path, split: str, folder: Path) -> None:
    """Write them into `folder`. `split` is the pre-tokenizer that the file names. Raises ValueError if it is not known
    here.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    _set_split(tokenizer, split)
    tokenizer.save_pretrained(folder)


def _set_split(tokenizer: PreTrainedTokenizerFast, split: str) -> None:
    """Set the pre-tokenizer that the file names; Transformers takes GPT-2's for any name it does not know."""
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = tokenizer.backend_tokenizer
    if split in _DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and split not in _PLAIN_GPT2:
        raise ValueError(f"its pre-tokenizer {split!r} is not known here; use the model's Transformers folder")
