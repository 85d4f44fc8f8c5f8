"""`docker/build-here.sh prove` with programs in place of buildah and of the proof: what it refuses, what it leaves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.docker.reading import DOCKER

BUILDAH = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
case "$*" in
    *" from "*) echo container-7 ;;
    *" mount "*) echo "$ROOT" ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the programs are, with the container's `root`."""
    (tmp_path / "root").mkdir()
    for name, script in {"buildah": BUILDAH, "install": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    for name, path in {"CALLS": "calls", "ROOT": "root", "FOLDER": "images"}.items():
        monkeypatch.setenv(name, str(tmp_path / path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def prove(folder: Path, status: int) -> subprocess.CompletedProcess[str]:
    """Run it with a proof that ends with `status`."""
    (folder / "python3").write_text(f"#!/bin/sh\necho proof\nexit {status}\n")
    (folder / "python3").chmod(0o755)
    return subprocess.run([DOCKER / "build-here.sh", "prove"], capture_output=True, text=True)


@pytest.mark.parametrize("status", [0, 1])
def test_it_leaves_no_container_whatever_the_proof_says(folder: Path, status: int) -> None:
    done = prove(folder, status)
    assert done.returncode == status, done.stderr
    assert "proof" in done.stdout
    assert (folder / "calls").read_text().endswith(" rm container-7\n")


def test_an_image_above_one_and_a_half_gigabytes_is_refused(folder: Path) -> None:
    with (folder / "root/large").open("wb") as file:
        file.truncate(1_501_000_000)  # of holes
    done = prove(folder, 0)
    assert done.returncode == 1
    assert "that is more than 1500 MB" in done.stderr
    assert "proof" not in done.stdout
    assert (folder / "calls").read_text().endswith(" rm container-7\n")
