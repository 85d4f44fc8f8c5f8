"""Folders of GGUF files in the cache, each made once."""

import hashlib
from pathlib import Path

from app.domain.errors import UnknownModel
from app.model_store.gguf.apart import convert_apart
from app.model_store.install import install_once

_FORM = 4
"""Of the folders, so that one of another form is never read."""


def cached_gguf(path: Path, cache_dir: Path) -> Path:
    """The folder of the GGUF file at `path`, which refers to it; made if it is not in the cache yet.

    The cache is keyed by place, size and time of change, so that starting again does not read the whole file.
    Raises UnknownModel if there is no such file, ConversionFailed or StoreFull.
    """
    source = path.expanduser().resolve()
    if not source.is_file():
        raise UnknownModel(f"there is no GGUF file {path}", param="model")
    state = source.stat()
    folder = gguf_folder(cache_dir, source.stem, f"{source}\0{state.st_size}\0{state.st_mtime_ns}")
    install_once(folder, lambda scratch: convert_apart(source, scratch))
    return folder


def gguf_folder(cache_dir: Path, name: str, identity: str) -> Path:
    """Where the folder of a GGUF file is, once it is made. `identity` tells files of the same name apart."""
    key = hashlib.sha256(f"{_FORM}\0{identity}".encode()).hexdigest()[:12]
    return cache_dir.expanduser() / "gguf" / f"{name}-{key}"
