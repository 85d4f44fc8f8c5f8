"""NIXL, which `make setup-dev` installs on Linux, and `make setup` does not."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
R = TypeVar("R")

NEEDS_NIXL = (
    pytest.mark.dev,
    pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="make setup-dev installs NIXL, on Linux"),
)
"""Marks of a parameter."""


def needs_nixl(test: Callable[P, R]) -> Callable[P, R]:
    """The same for a test."""
    dev, skip = NEEDS_NIXL
    return dev(skip(test))
