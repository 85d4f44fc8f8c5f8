"""Which files of a Transformers folder hold its weights."""

import json
from pathlib import Path

from app.model_store.errors import BrokenModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def shard_of_tensors(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, as the folder's index lists them; None: there is no index. Raises BrokenModel.

    A folder may hold other files with the same weights, such as `consolidated.safetensors`, which Djinn does not read.
    """
    index = folder / INDEX
    if not index.exists():
        return None
    try:
        listed = dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BrokenModel(f"{index} has no weight_map that can be read: {error!r}", param="model") from error
    for file in listed.values():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise BrokenModel(f"{index} names {file!r}, which is no file of its folder", param="model")
    return listed


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; none if it has no weights. Raises BrokenModel."""
    listed = shard_of_tensors(folder)
    if listed is not None:
        return [folder / file for file in sorted(set(listed.values()))]
    single = folder / SINGLE
    return [single] if single.exists() else []
