"""What `djinn models` does."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path

from rich.console import Console
from rich.table import Table

from app.domain.errors import FieldOutOfRange, UnknownModel
from app.model_store.install import install_once, require_free_space
from app.model_store.pull import CATALOG, pull_model, pulled_folder
from app.model_store.resolve import resolve
from app.model_store.saved import SAVED
from app.model_store.tensors import GGUF_INDEX, INDEX, GgufIndex, is_indexed

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
    if folder.is_dir() and (folder / CHECKPOINT).resolve() != source.resolve():
        shutil.rmtree(folder)  # it was made of another file, or by another version of Djinn
    install_once(folder, lambda scratch: _export(source, scratch))
    return folder


def _export(source: Path, folder: Path) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.numpy import save_file

    index = GgufIndex.read(source)
    shards = split_state_dict_into_shards_factory(
        {name: 4 * prod(tensor.shape) for name, tensor in index.tensors.items()},
        get_storage_size=lambda nbytes: nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    require_free_space(folder, shards.metadata["total_size"])
    for path in source.iterdir():
        if path.name not in (GGUF_INDEX, SAVED) and path not in index.files:
            shutil.copy(path, folder)
    (folder / CHECKPOINT).symlink_to(source.resolve())
    if len(index.files) == 1:
        (folder / f"{CHECKPOINT}.gguf").symlink_to(index.files[0].resolve())
    for file, names in shards.filename_to_tensors.items():
        save_file({name: index.values(name) for name in names}, folder / file, metadata={"format": "pt"})
    if shards.is_sharded:
        listed = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(listed))


def pull(name: str, cache_dir: Path) -> None:
    """Fetch a catalogue model and print its folder. Raises UnknownModel, which lists the names there are, and
    ModelStoreError.
    """
    if name not in CATALOG:
        raise UnknownModel(f"no model {name!r} in the catalogue; it has {', '.join(CATALOG)}", param="model")
    entry = CATALOG[name]
    console = Console(stderr=True)
    if pulled_folder(entry, cache_dir).is_dir():
        console.print(f"{name} is already here")
    print(pull_model(entry, cache_dir, console))


def list_models(cache_dir: Path) -> None:
    """Print the catalogue, and which of it is here."""
    table = Table("model", "pulled", "licence", "what it is")
    for entry in CATALOG.values():
        here = "yes" if pulled_folder(entry, cache_dir).is_dir() else "no"
        table.add_row(entry.name, here, entry.licence, entry.summary)
    Console().print(table)
