"""What a checkpoint says of how to generate: its `generation_config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model_store.errors import BrokenModel

if TYPE_CHECKING:
    from app.model_store.resolve import ResolvedModel


def generation_file(model: ResolvedModel) -> Path | None:
    """The model's file; None if it has none."""
    path = None if model.folder is None else model.folder / "generation_config.json"
    return path if path is not None and path.is_file() else None


def read_generation(path: Path) -> dict[str, Any]:
    """Its entries. Raises BrokenModel for a file that cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModel(f"cannot read {path}: {error}", param="model") from error
    if not isinstance(found, dict):
        raise BrokenModel(f"{path} must hold a JSON object, not {type(found).__name__}", param="model")
    return found
