"""The tokenizer of a resolved model, and the tokens that end its turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.model_store.byte_tokenizer import byte_tokenizer
from app.model_store.errors import BrokenModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from app.model_store.resolve import ResolvedModel


def load_tokenizer(model: ResolvedModel) -> PreTrainedTokenizerFast:
    """The tokenizer in the model's folder, or the byte-level one if its weights are random.

    Raises BrokenModel if the folder has no tokenizer that the `tokenizers` library can run.
    """
    if model.folder is None:
        return byte_tokenizer(model.config.vocab_size)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise BrokenModel(f"Transformers cannot read the tokenizer in {model.folder}: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise BrokenModel(f"the tokenizer in {model.folder} is not one of the tokenizers library")
    return tokenizer


def eos_token_ids(model: ResolvedModel, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """What generation_config.json (or, without one, config.json) and the tokenizer call the end of a turn."""
    from transformers import GenerationConfig

    source: Any = model.config
    if model.folder is not None and (model.folder / "generation_config.json").is_file():
        source = GenerationConfig.from_pretrained(model.folder, local_files_only=True)
    listed = source.eos_token_id if isinstance(source.eos_token_id, list) else [source.eos_token_id]
    return frozenset(token_id for token_id in [*listed, tokenizer.eos_token_id] if token_id is not None)
