"""`make dist`: what the wheel holds, and that its bytes depend on the commit alone."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "client", "djinn", "loadgen")
TOOLS = {"client/_generate.py"}
"""Of the checkout."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone: a copy has no commit"),
]


def build(folder: Path, umask: int) -> Path:
    """`make dist` in a clone of the last commit in `folder`; returns the folder of what it has built."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True, umask=umask)
    command = ["make", "--old-file", "setup", "dist", f"VENV={sys.prefix}"]
    done = subprocess.run(command, cwd=folder, umask=umask, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("first") / "djinn", umask=0o022)


def test_two_builds_of_a_commit_have_the_same_bytes(
    dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    other = build(tmp_path / "elsewhere", umask=0o077)
    assert sorted(os.listdir(dist)) == sorted(os.listdir(other))
    assert len(os.listdir(dist)) == 2
    for name in os.listdir(dist):
        assert (dist / name).read_bytes() == (other / name).read_bytes(), name


def test_the_wheel_holds_each_file_of_the_packages_and_no_other(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    command = ["git", "ls-tree", "-r", "--name-only", "HEAD", *PACKAGES]
    committed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert held == set(committed) - TOOLS
    assert "app/static/index.html" in held
