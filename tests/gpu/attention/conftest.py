"""What attention on CUDA needs of a machine without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.attention.flash_on_cpu import flash_on_cpu


@pytest.fixture(scope="session", autouse=True)
def _flash_on_cpu() -> Iterator[None]:
    """Prompts in half precision run where Triton is interpreted."""
    with flash_on_cpu():
        yield
