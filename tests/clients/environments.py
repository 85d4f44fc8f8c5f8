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


def python_environment(
    cache: str, kind: str, packages: Sequence[str], *flags: str, python: str = sys.executable
) -> Path:
    """The Python of an environment with these packages. The first call installs them, with the `flags` of uv's pip: in
    seconds, where pip itself takes a minute, and compiles what nothing imports.
    """
    folder = folder_of(cache, kind, packages)
    with making(folder) as is_missing:
        if is_missing:
            uv = str(_uv(cache))
            run(uv, "venv", "--clear", "--python", python, str(folder))
            run(uv, "pip", "install", "--python", str(folder), *flags, *packages)
    return folder / "bin" / "python"


def _uv(cache: str) -> Path:
    folder = folder_of(cache, "uv", ["uv"])
    with making(folder) as is_missing:
        if is_missing:
            run(sys.executable, "-m", "venv", "--clear", str(folder))
            run(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv")
    return folder / "bin" / "uv"


def node_environment(cache: str, kind: str, packages: Sequence[str]) -> Path:
    """A folder whose `node_modules` has these packages. The first call installs them."""
    folder = folder_of(cache, kind, packages)
    with making(folder) as is_missing:
        if is_missing:
            run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *packages)
    return folder


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
