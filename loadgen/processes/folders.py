"""Where things are kept that are fetched once: by default where Djinn itself keeps its models."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """What `DJINN_CACHE_DIR` names, which the server reads too, or else `~/.cache/djinn`."""
    return Path(os.environ.get("DJINN_CACHE_DIR") or "~/.cache/djinn")


def default_model() -> Path:
    """The model that is measured unless another is named. It may not be there yet."""
    return cache_folder() / "models/smollm2-135m-instruct"


def peers_folder() -> Path:
    """Environments, logs, and notes about running servers."""
    return cache_folder().expanduser() / "peers"
