"""A machine to build up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.machines import Kernel


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    """A kernel that tells nothing yet."""
    return Kernel(tmp_path / "root")
