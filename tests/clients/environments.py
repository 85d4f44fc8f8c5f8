"""Environments of their own for what the tests install, and the programs that run in them."""

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


def folder_of(cache: str, kind: str, packages: Sequence[str]) -> Path:
    """A folder for each set of versions, below `cache` in the root of the repository."""
    return ROOT / cache / f"{kind}-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:8]}"


def python_environment(cache: str, kind: str, packages: Sequence[str], *flags: str) -> Path:
    """The Python of an environment with these packages. The first call installs them, with pip's `flags`."""
    folder = folder_of(cache, kind, packages)
    python = folder / "bin" / "python"
    with making(folder) as is_missing:
        if is_missing:
            run(sys.executable, "-m", "venv", "--clear", str(folder))
            run(str(python), "-m", "pip", "install", "--quiet", *flags, *packages)
    return python


@contextmanager
def making(folder: Path) -> Iterator[bool]:
    """Whether the block is to fill `folder`. Other processes of a test run wait meanwhile, and then find it whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_missing = not (folder / "installed").exists()
        yield is_missing
        if is_missing:
            (folder / "installed").touch()


def run(*command: str, **variables: str) -> str:
    """Run a command with these environment variables beside the test's own; returns what it said.

    Raises `AssertionError` if it fails.
    """
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
