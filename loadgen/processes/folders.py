"""Where things are kept that are fetched once: by default where Djinn itself keeps its models."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """What `DJINN_CACHE_DIR` names, which the server reads too, or else `~/.cache/djinn`."""
    return Path(os.environ.get("DJINN_CACHE_DIR") or "~/.cache/djinn")


def default_model() -> Path:
    """The model that is measured unless another is named. It may not be there yet."""
    return cache_folder() / "models/smollm2-135m-instruct"


def checkpoint_folder(model: Path) -> Path:
    """What Djinn serves with the weights of the Transformers folder `model`: the GGUF file that it was made of, by the
    link that `djinn models export` left there, or else the folder itself.
    """
    checkpoint = model / "checkpoint"
    return checkpoint if checkpoint.exists() else model


def checkpoint_file(model: Path) -> Path | None:
    """The GGUF file that the Transformers folder `model` was made of, if there is one."""
    file = model / "checkpoint.gguf"
    return file if file.exists() else None


def peers_folder() -> Path:
    """Environments, logs, and notes about running servers."""
    return cache_folder().expanduser() / "peers"
