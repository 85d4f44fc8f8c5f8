"""NIXL, which `make setup-dev` installs on Linux, and `make setup` does not."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TypeVar

import pytest

Test = TypeVar("Test")

NEEDS_NIXL = (
    pytest.mark.dev,
    pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="make setup-dev installs NIXL, on Linux"),
)
"""Marks of a parameter."""


def needs_nixl(test: Test) -> Test:
    """The same for a test."""
    for mark in NEEDS_NIXL:
        test = mark(test)
    return test
