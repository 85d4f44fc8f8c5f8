"""Whether servers run on a GPU here."""

import shutil


def on_cuda() -> bool:
    """Whether this machine has an NVIDIA GPU with its driver."""
    return shutil.which("nvidia-smi") is not None
