"""`make setup` on a machine that lacks something: it says what to do, and begins nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = """#!/bin/sh
exec {python} -c 'import sys; sys.version_info, sys.version = (3, 10, 12), "3.10.12"; exec(sys.argv[1])' "$2"
"""
"""A Python that says that it is another one, for `python -c CODE`."""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def refusal(folder: Path, python: str, **variables: str) -> str:
    """What `make setup` says when it does not begin."""
    command = ["make", "setup", f"VENV={folder / 'venv'}", f"PYTHON={python}"]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert not (folder / "venv").exists()
    return done.stderr.splitlines()[0]


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    needed = "Djinn needs Python 3.11 or newer. If it has another name here: make setup PYTHON=python3.12"
    assert refusal(tmp_path, "python9") == f"There is no python9 here. {needed}"


def test_a_python_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text(OLD.format(python=sys.executable))
    old.chmod(0o755)
    said = refusal(tmp_path, str(old))
    assert said.startswith(f"{old} is 3.10.12. Djinn needs Python 3.11 or newer.")


def test_a_python_that_makes_no_environments(tmp_path: Path) -> None:
    """As Debian's is without the package python3-venv."""
    (tmp_path / "ensurepip.py").write_text("raise ModuleNotFoundError")
    said = refusal(tmp_path, sys.executable, PYTHONPATH=str(tmp_path))
    assert said.endswith("On Debian and Ubuntu: apt-get install python3-venv")
