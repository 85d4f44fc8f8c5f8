"""Triton's interpreter takes what its compiler refuses: so the kernels are compiled too, which needs no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import RESULTS
from tests.gpu.attention import drawing

pytestmark = [drawing.needs_triton, pytest.mark.long]

SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""That one program may take. Of compute capability 8.x, what the consumer devices have, which run the same binaries
(CUDA C++ Programming Guide, table of technical specifications)."""
STACK_BYTES = 16
"""Of a thread: more are spilled registers."""

Kernels = list[dict[str, Any]]


def compiled(capability: int, shapes: str, cache: Path) -> Kernels:
    """The kernels as our own code launches them, compiled where the tests' choice of the interpreter is unknown."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.compile.child", str(capability), shapes]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_no_kernel_takes_more_than_the_record_says(capability: int, tmp_path: Path) -> None:
    """In every size of head, type, group and block. A change that is worth it comes with a new record."""
    import triton

    record = json.loads(max(RESULTS.glob("compile-*.json")).read_text("utf-8"))
    kernels = compiled(capability, "main", tmp_path)
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert kernel["stack_bytes"] <= STACK_BYTES, kernel
        assert kernel["programs"] >= 1, kernel
    if record["triton"] != triton.__version__:
        pytest.skip(f"the record is of Triton {record['triton']}")
    known = {key(each): each for each in record["kernels"]}
    for each in kernels:
        for name in ("registers", "stack_bytes", "shared_bytes"):
            assert each[name] <= known[key(each)][name], each
        for name in ("mma", "wgmma", "async_copies"):
            assert bool(each[name]) == bool(known[key(each)][name]), each


def key(kernel: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(
        kernel[name] for name in ("capability", "purpose", "kernel", "head_dim", "group", "block_size", "dtype")
    )
