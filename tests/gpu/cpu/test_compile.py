"""Machine code for a CPU is kept as long as it is what would be compiled, and a start tells of what it compiles."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from numba.core import config
from numba.np.numpy_support import carray

import app
from app.gpu.cpu.compilations import COMPILATIONS
from app.gpu.cpu.compile import c_function, compiled_features, kernel_folder
from app.gpu.cpu.intrinsics import pointer

ROOT = Path(app.__path__[0]).parent
COMPILE = """
import torch
from app.gpu.cpu.row_kernels import compiled
print(compiled("add", torch.float32).cache_hits)
"""


def _kernel(address: int) -> None:
    carray(pointer(address), 1, np.int64)[0] = 7


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for machine code."""
    monkeypatch.setenv("DJINN_CACHE_DIR", str(tmp_path))
    return kernel_folder()


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    assert [c_function(_kernel).cache_hits for _ in range(3)] == [0, 1, 1]
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert [c_function(_kernel).cache_hits for _ in range(2)] == [0, 1], "a damaged file was not replaced"


def test_closures_over_other_types_are_other_kernels(folder: Path) -> None:
    def kernel_of(element: type) -> None:
        def kernel(address: int) -> None:
            carray(pointer(address), 1, element)[0] = 1

        assert c_function(kernel).cache_hits == 0

    kernel_of(np.int32)
    kernel_of(np.float32)


def test_where_nothing_can_be_kept_each_start_compiles(folder: Path) -> None:
    folder.write_text("a file stands in the way")
    assert [c_function(_kernel).cache_hits for _ in range(2)] == [0, 0]


def test_machine_code_that_was_not_used_for_long_is_removed(folder: Path) -> None:
    folder.mkdir()
    (folder / "old").touch()
    (folder / "new").touch()
    os.utime(folder / "old", (time.time() - 100 * 86400,) * 2)
    c_function(_kernel)
    assert not (folder / "old").exists()
    assert (folder / "new").exists()


def test_features_are_those_that_numba_is_told_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx2,+avx512f,-amx-bf16")
    assert compiled_features() == {"avx2", "avx512f"}


@pytest.mark.long
def test_a_checkout_uses_what_another_has_compiled_until_a_file_of_the_kernel_changes(tmp_path: Path) -> None:
    """A comment in a file that the kernel does not import changes nothing; other instructions do."""
    environment = {**os.environ, "DJINN_CACHE_DIR": str(tmp_path / "cache")}

    def hits(checkout: Path, **variables: str) -> int:
        told = {**environment, "PYTHONPATH": str(checkout), **variables}
        return int(subprocess.check_output([sys.executable, "-c", COMPILE], cwd=tmp_path, env=told))

    assert hits(ROOT) == 0
    other = tmp_path / "other"
    shutil.copytree(ROOT / "app", other / "app", ignore=shutil.ignore_patterns("__pycache__"))
    assert hits(other) == 1
    assert hits(other, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="") == 0
    for name, expected in (("attention/triton_attend.py", 1), ("cpu/intrinsics.py", 0)):
        with (other / "app/gpu" / name).open("a") as file:
            file.write("# A comment.\n")
        assert hits(other) == expected, name


def test_a_start_tells_of_the_kernels_that_it_compiles(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="app.gpu.cpu.compilations"):
        with COMPILATIONS.telling():
            c_function(_kernel)
        before, after = caplog.messages
        assert before == "compiling kernels for this processor: it takes a minute or two, the first time"
        assert after.startswith("compiled 1 kernel in ")
        caplog.clear()
        with COMPILATIONS.telling():
            c_function(_kernel)  # from the cache
        shutil.rmtree(folder)
        c_function(_kernel)  # after the start
        assert caplog.messages == []
