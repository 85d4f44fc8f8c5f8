"""The tokenizer of a resolved model, and the tokens that end its turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model_store.byte_tokenizer import byte_tokenizer
from app.model_store.errors import BrokenModel
from app.model_store.generation import generation_file, read_generation
from app.model_store.model_tokenizer import ModelTokenizer
from app.model_store.saved import is_saved, read_tokenizer

if TYPE_CHECKING:
    from app.model_store.resolve import ResolvedModel


def load_tokenizer(model: ResolvedModel) -> ModelTokenizer:
    """The tokenizer in the model's folder, or the byte-level one if its weights are random.

    Raises BrokenModel if the folder has no tokenizer that the `tokenizers` library can run.
    """
    if model.folder is None:
        return ModelTokenizer.of(byte_tokenizer(model.config.vocab_size))
    if is_saved(model.folder):
        return read_tokenizer(model.folder)
    return _load_with_transformers(model.folder)


def _load_with_transformers(folder: Path) -> ModelTokenizer:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise BrokenModel(f"Transformers cannot read the tokenizer in {folder}: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise BrokenModel(f"the tokenizer in {folder} is not one of the tokenizers library")
    return ModelTokenizer.of(tokenizer)


def eos_token_ids(model: ResolvedModel, tokenizer: ModelTokenizer) -> frozenset[int]:
    """What generation_config.json (or, without one, config.json) and the tokenizer call the end of a turn.

    Raises BrokenModel for a generation_config.json that cannot be read.
    """
    path = generation_file(model)
    stored: Any = model.config.eos_token_id if path is None else read_generation(path).get("eos_token_id")
    listed = stored if isinstance(stored, list) else [stored]
    return frozenset(token_id for token_id in [*listed, tokenizer.facts.eos_token_id] if token_id is not None)
