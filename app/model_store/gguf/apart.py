"""Converting a GGUF file in a process of its own, which gives its memory back."""

import signal
import subprocess
import sys
from pathlib import Path

import orjson

from app.model_store import errors
from app.model_store.gguf.conversion import convert_gguf

_FAILED = 3
"""The status of a process that has said on its last line what went wrong."""


def convert_apart(source: Path, folder: Path) -> None:
    """As `convert_gguf`, with the same errors. A server would keep the 400 MB that PyTorch and Transformers take; a
    process that has PyTorch loaded already converts the file itself, which saves seconds.
    """
    if "torch" in sys.modules:
        convert_gguf(source, folder)
        return
    command = [sys.executable, "-P", "-m", "app.model_store.gguf.apart", str(source), str(folder)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if ended.returncode == _FAILED:
        kind, message = orjson.loads(ended.stdout.splitlines()[-1])
        raise getattr(errors, kind)(message)
    if ended.returncode:
        raise errors.ConversionFailed(
            f"the conversion of {source.name} ended with status {ended.returncode}; memory may have been too short"
        )


def _main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the process that asked tells of a Ctrl-C
    try:
        convert_gguf(*map(Path, sys.argv[1:]))
    except errors.ModelStoreError as error:
        print("\n", orjson.dumps((type(error).__name__, error.message)).decode(), sep="")
        return _FAILED
    return 0


if __name__ == "__main__":
    sys.exit(_main())
