"""Exported sessions on this side: files that appear whole or not at all."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 1 << 20


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes its place at `path` at the end of the block; after an error nothing is left."""
    partial = path.with_name(f"{path.name}.part")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


async def read_chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    """The rest of the file, read on another thread."""
    while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield chunk


def dictionary_files(path: Path) -> tuple[bytes | None, Path]:
    """The `cfg.json` and the weights of a folder that SAELens has written; of a file only that. Raises `OSError`."""
    if not path.is_dir():
        return None, path
    return (path / "cfg.json").read_bytes(), path / "sae_weights.safetensors"
