"""The checkpoint that a Transformers folder was made of, for servers that compute with its own blocks."""

from pathlib import Path

CHECKPOINT = "checkpoint"
"""The link that `djinn models export` leaves in the folder to that of the GGUF file; with `.gguf`, to the file."""


def checkpoint_folder(model: Path) -> Path:
    """What Djinn serves with the weights of `model`; `model` itself where it was made of no GGUF file."""
    checkpoint = model / CHECKPOINT
    return checkpoint.resolve() if checkpoint.exists() else model


def checkpoint_file(model: Path) -> Path | None:
    """The GGUF file, where there is one."""
    file = model / f"{CHECKPOINT}.gguf"
    return file.resolve() if file.exists() else None
