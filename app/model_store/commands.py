"""What `djinn models` does."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path

from rich.console import Console
from rich.table import Table

from app.domain.errors import FieldOutOfRange
from app.model_store.install import install_once, require_free_space
from app.model_store.pull import CATALOG, catalog_entry, pull_model, pulled_folder
from app.model_store.resolve import resolve
from app.model_store.saved import SAVED
from app.model_store.tensors import GGUF_INDEX, GgufTensors, is_indexed

CHECKPOINT = "checkpoint"
"""A link in the folder to that of the GGUF file, for who takes it as it is; with `.gguf`, to the file."""
SHARD_BYTES = 4 << 30
"""Most bytes of one weight file, unless one tensor has more; so many are in memory at once."""


def export_model(spec: str, cache_dir: Path) -> Path:
    """The Transformers folder of the model `spec`: its own, or one in the cache with a GGUF file's weights in float32.

    Makes that one once: 4 bytes of disk per parameter. Raises FieldOutOfRange for random weights, what `resolve` raises
    and StoreFull.
    """
    source = resolve(spec, cache_dir=cache_dir).folder
    if source is None:
        raise FieldOutOfRange(f"{spec} has random weights, and no folder", param="model")
    if not is_indexed(source):
        return source
    folder = cache_dir.expanduser() / "models" / (spec if spec in CATALOG else source.name)
    install_once(folder, lambda scratch: _export(source, scratch))
    return folder


def _export(source: Path, folder: Path) -> None:
    tensors = GgufTensors(source)
    shards = _shards({name: 4 * prod(tensor.shape) for name, tensor in tensors.tensors.items()})
    require_free_space(folder, _nbytes(shards))
    for path in source.iterdir():
        if path.name not in (GGUF_INDEX, SAVED) and path != tensors.path:
            shutil.copy(path, folder)
    (folder / CHECKPOINT).symlink_to(source.resolve())
    (folder / f"{CHECKPOINT}.gguf").symlink_to(tensors.path.resolve())
    _write_weights(tensors, shards, folder)


def _write_weights(tensors: GgufTensors, shards: list[dict[str, int]], folder: Path) -> None:
    from safetensors.numpy import save_file

    places: dict[str, str] = {}
    for index, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensors.values(name) for name in shard}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index_file = {"metadata": {"total_size": _nbytes(shards)}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))


def _shards(sizes: dict[str, int]) -> list[dict[str, int]]:
    """The tensors of each weight file, with their bytes."""
    shards: list[dict[str, int]] = [{}]
    for name, nbytes in sizes.items():
        if shards[-1] and sum(shards[-1].values()) + nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = nbytes
    return shards


def _nbytes(shards: list[dict[str, int]]) -> int:
    return sum(sum(shard.values()) for shard in shards)


def pull(name: str, cache_dir: Path) -> None:
    """Fetch a catalogue model and print its folder. Raises UnknownModel or ModelStoreError."""
    entry = catalog_entry(name)
    console = Console(stderr=True)
    if pulled_folder(entry, cache_dir).is_dir():
        console.print(f"{name} is already here")
    print(pull_model(entry, cache_dir, console))


def export(spec: str, cache_dir: Path) -> None:
    """Print the Transformers folder of a model, made if need be. Raises what `export_model` raises."""
    print(export_model(spec, cache_dir))


def list_models(cache_dir: Path) -> None:
    """Print the catalogue, and which of it is here."""
    table = Table("model", "pulled", "licence", "what it is")
    for entry in CATALOG.values():
        here = "yes" if pulled_folder(entry, cache_dir).is_dir() else "no"
        table.add_row(entry.name, here, entry.licence, entry.summary)
    Console().print(table)
