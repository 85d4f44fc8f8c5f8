"""What is compiled for a CPU is kept, for as long as it is what would be compiled."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import config
from numba.core.codegen import JITCPUCodegen
from numba.np.numpy_support import carray

import app.gpu
from app.gpu.cpu import compile as cpu_compile
from app.gpu.cpu.compile import c_function, compiled_features
from app.gpu.cpu.intrinsics import pointer
from app.gpu.linear.cpu import tile as tiles

CODEGEN: Any = JITCPUCodegen


def _kernel(address: int) -> None:
    carray(pointer(address), 1, np.int64)[0] = 7


def test_machine_code_is_kept_until_a_file_that_kernels_are_made_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    c_function(_kernel)
    assert c_function(_kernel).cache_hits == 1
    monkeypatch.setattr(cpu_compile, "kernel_sources", lambda: "another digest")
    c_function(_kernel)._cache.flush()
    assert c_function(_kernel).cache_hits == 0


def _imports_a_compiler(path: Path) -> bool:
    modules = [
        name
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    return any(module.split(".")[0] in ("numba", "llvmlite") for module in modules)


def test_every_file_that_holds_code_of_kernels_is_in_the_digest() -> None:
    """A file that is not would leave old machine code in Numba's cache when it changes."""
    engine = Path(app.gpu.__path__[0])
    written_for_a_compiler = {path for path in engine.rglob("*.py") if _imports_a_compiler(path)}
    assert len(written_for_a_compiler) > 5
    assert written_for_a_compiler <= set(cpu_compile.kernel_files())


@pytest.mark.parametrize(
    ("told", "tile"),
    [("+sse4.2", (6, 2, 4)), ("+avx2,+fma", (6, 2, 8)), ("+avx2,+avx512f,-amx-bf16", (12, 2, 16))],
)
def test_instructions_that_numba_is_told_to_use_decide_about_tiles(
    told: str, tile: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "CPU_FEATURES", told)
    assert tiles._shape_of_tiles() == tile
    assert "amx-bf16" not in compiled_features()


def test_machine_code_for_other_instructions_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    key = c_function(_kernel)._cache._index_key(None, CODEGEN("plain"))
    monkeypatch.setattr(config, "CPU_FEATURES", "+sse4.2")
    assert c_function(_kernel)._cache._index_key(None, CODEGEN("masked")) != key
