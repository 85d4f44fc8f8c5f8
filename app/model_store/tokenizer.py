"""The tokenizer of a resolved model, and the tokens that end its turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model_store.install import BrokenModel
from app.model_store.saved import ModelTokenizer, is_saved, read_tokenizer
from app.model_store.shapes import byte_tokenizer

if TYPE_CHECKING:
    from app.model_store.resolve import ResolvedModel


def read_generation(model: ResolvedModel) -> tuple[Path, dict[str, Any]] | None:
    """The model's generation_config.json and its entries; None if it has none. Raises BrokenModel for a file that
    cannot be read.
    """
    path = None if model.folder is None else model.folder / "generation_config.json"
    if path is None or not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModel(f"cannot read {path}: {error}", param="model") from error
    if not isinstance(found, dict):
        raise BrokenModel(f"{path} must hold a JSON object, not {type(found).__name__}", param="model")
    return path, found


def load_tokenizer(model: ResolvedModel) -> ModelTokenizer:
    """The tokenizer in the model's folder, or the byte-level one if its weights are random.

    Raises BrokenModel if the folder has no tokenizer that the `tokenizers` library can run, or one that has more tokens
    than the model. Added tokens do not count: some models, such as Gemma 3, name one that they have no use for.
    """
    if model.folder is None:
        return byte_tokenizer(model.config.vocab_size)
    saved = is_saved(model.folder)
    tokenizer = read_tokenizer(model.folder) if saved else _load_with_transformers(model.folder)
    tokens, known = tokenizer.backend.get_vocab_size(with_added_tokens=False), model.config.get_text_config().vocab_size
    if tokens > known:
        said = f"the tokenizer in {model.folder} has {tokens} tokens, and vocab_size in config.json is {known}"
        raise BrokenModel(f"{said}: it is not the model's", param="model")
    return tokenizer


def _load_with_transformers(folder: Path) -> ModelTokenizer:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a library trips over, it is these files that cannot be read
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise BrokenModel(f"Transformers cannot read the tokenizer in {folder}: {why}", param="model") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise BrokenModel(f"the tokenizer in {folder} is not one of the tokenizers library")
    return ModelTokenizer.of(tokenizer)


def eos_token_ids(model: ResolvedModel, tokenizer: ModelTokenizer) -> frozenset[int]:
    """What generation_config.json (or, without one, config.json) and the tokenizer call the end of a turn.

    Raises BrokenModel for a generation_config.json that cannot be read.
    """
    said = read_generation(model)
    stored: Any = model.config.eos_token_id if said is None else said[1].get("eos_token_id")
    listed = stored if isinstance(stored, list) else [stored]
    return frozenset(token_id for token_id in [*listed, tokenizer.eos_token_id] if token_id is not None)
