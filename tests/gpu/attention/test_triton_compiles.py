"""Triton's interpreter takes what its compiler refuses: so the kernels are compiled too, which needs no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.attention import drawing

pytestmark = drawing.needs_triton

SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}
"""That one program may take. Of compute capability 8.x, what the consumer devices have, which run the same binaries
(CUDA C++ Programming Guide, table of technical specifications)."""


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.long), 90])
def test_the_kernels_compile_and_fit(capability: int, tmp_path: Path) -> None:
    script = Path(drawing.__file__).with_name("compiling.py")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    output = subprocess.run(
        [sys.executable, script, str(capability)], env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    kernels = [json.loads(line) for line in output.splitlines()]
    attention = ["_store", "_attend", "_attend", "_attend", "_merge"]
    assert [kernel["kernel"] for kernel in kernels] == [*attention, "_matmul", "_matmul", "_matmul"]
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability]
        assert kernel["stack_bytes"] <= 16, "registers are spilled"
