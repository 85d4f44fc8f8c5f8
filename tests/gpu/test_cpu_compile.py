"""What is compiled for a CPU is kept, for as long as it is what would be compiled."""

from __future__ import annotations

import numpy as np
import pytest
from numba.np.numpy_support import carray

from app.gpu import cpu_compile
from app.gpu.cpu_compile import c_function
from app.gpu.cpu_intrinsics import pointer


def _kernel(address: int) -> None:
    carray(pointer(address), 1, np.int64)[0] = 7


def test_machine_code_is_kept_until_a_file_that_kernels_are_made_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    c_function(_kernel)
    assert c_function(_kernel).cache_hits == 1
    monkeypatch.setattr(cpu_compile, "kernel_sources", lambda: "another digest")
    c_function(_kernel)._cache.flush()
    assert c_function(_kernel).cache_hits == 0
