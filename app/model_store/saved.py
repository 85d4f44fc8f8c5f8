"""What a start must know of a model beside its weights, so that it needs no Transformers.

Importing Transformers and its configurations takes longer than all the rest of a start. So what it finds in a GGUF file
is kept as it is found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from tokenizers import Tokenizer

from app.model_store.install import DAMAGED, BrokenModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

Config: TypeAlias = "PretrainedConfig"
"""A model's configuration in Transformers, which takes a second to import; or a `SavedConfig`, which reads alike."""


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """`backend` cuts text into tokens and joins them; the others are what the tokenizers library does not know."""

    backend: Tokenizer
    special_tokens: Mapping[str, str]
    """`bos_token` and the like: variables of the chat template."""
    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: str | Mapping[str, str] | None
    """Of several, each has a name."""
    response_template: dict[str, Any] | None
    """How the checkpoint says that its answers are read."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> ModelTokenizer:
        """The tokenizer that Transformers has read."""
        return cls(
            backend=tokenizer.backend_tokenizer,
            special_tokens=dict(tokenizer.special_tokens_map),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            chat_template=tokenizer.chat_template,
            response_template=getattr(tokenizer, "response_template", None),
        )


SAVED = "djinn.json"
_TOKENIZER = "tokenizer.json"


class SavedConfig(SimpleNamespace):
    """A Transformers configuration with all its entries, under all their names, as Djinn's own stacks read it."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def get_text_config(self) -> SavedConfig:
        """Itself: the models of GGUF files and of `random:SHAPE` read text only."""
        return self

    def standardize_rope_params(self) -> None:
        """Transformers has done so before it was saved, and asks for it again where it computes frequencies."""


def is_saved(folder: Path) -> bool:
    """Whether the folder has what `save` writes."""
    return (folder / SAVED).is_file()


def save(folder: Path) -> None:
    """Keep what Transformers reads from the folder's config and tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    found: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer = ModelTokenizer.of(found)
    tokenizer.backend.save(str(folder / _TOKENIZER))
    entries = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    entries |= {other: getattr(config, name) for other, name in config.attribute_map.items() if name in entries}
    facts = {each.name: getattr(tokenizer, each.name) for each in fields(tokenizer) if each.name != "backend"}
    kept = {"config": entries, "tokenizer": facts}
    (folder / SAVED).write_text(json.dumps(kept, default=str))


def read_config(folder: Path) -> Config:
    """The configuration that was saved. Raises BrokenModel if it cannot be read."""
    found = _read(folder, "config")
    if "model_type" not in found:
        raise BrokenModel(f"{folder / SAVED} has no model_type in its config", param="model")
    return cast("PretrainedConfig", SavedConfig(**found))


def read_tokenizer(folder: Path) -> ModelTokenizer:
    """The tokenizer that was saved. Raises BrokenModel if it cannot be read."""
    found = _read(folder, "tokenizer")
    try:
        return ModelTokenizer(Tokenizer.from_file(str(folder / _TOKENIZER)), **found)
    except Exception as error:  # the library raises nothing narrower
        raise BrokenModel(f"cannot read {folder / _TOKENIZER}: {error}", param="model") from error


def _read(folder: Path, part: str) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / SAVED).read_text())[part])
    except DAMAGED as error:
        raise BrokenModel(f"cannot read {folder / SAVED}: {error!r}", param="model") from error
