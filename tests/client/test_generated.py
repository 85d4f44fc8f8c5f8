"""The blocking half of the client is what the half for asyncio becomes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import client

ROOT = Path(__file__).parents[2]


def generate(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "client/_generate.py", *options]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The client and Ruff's settings, to be changed."""
    shutil.copytree(Path(client.__file__).parent, tmp_path / "client", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_blocking_half_is_as_generated() -> None:
    checked = generate(ROOT, "--check")
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_change_of_either_half_makes_the_blocking_one_stale(checkout: Path) -> None:
    source, changed = (checkout / "client" / name for name in ("_async/vectors.py", "_sync/vectors.py"))
    extra, missing = (checkout / "client/_sync" / name for name in ("extra.py", "turn.py"))
    source.write_text(source.read_text().replace("async def list", "async def names"))
    extra.touch()
    missing.unlink()

    checked = generate(checkout, "--check")
    assert checked.returncode == 1
    assert [line.partition(" is stale")[0] for line in checked.stderr.splitlines()] == [
        str(path) for path in (extra, missing, changed)
    ]

    assert generate(checkout).returncode == 0
    assert "    def names" in changed.read_text()
    assert generate(checkout, "--check").returncode == 0
