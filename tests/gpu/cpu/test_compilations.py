"""A start that compiles kernels says so, before and after; one that finds them in the cache says nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numba.np.numpy_support import carray

from app.gpu.cpu import compile as cpu_compile
from app.gpu.cpu.compilations import COMPILATIONS
from app.gpu.cpu.compile import c_function
from app.gpu.cpu.intrinsics import pointer


def _kernel(address: int) -> None:
    carray(pointer(address), 1, np.int64)[0] = 8


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="app.gpu.cpu.compilations"):
        yield caplog


def compiled(monkeypatch: pytest.MonkeyPatch, digest: str) -> Any:
    """As in a process that begins after files of kernels have become those with this digest."""
    monkeypatch.setattr(cpu_compile, "kernel_sources", lambda: digest)
    return c_function(_kernel)


def test_kernels_that_are_compiled_at_the_start_are_announced_and_counted(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    compiled(monkeypatch, "one")._cache.flush()
    with COMPILATIONS.telling():
        compiled(monkeypatch, "two")
        assert said.messages == ["compiling kernels for this processor: it takes a minute or two, the first time"]
        compiled(monkeypatch, "three")
    (_, after) = said.messages
    assert after.startswith("compiled 2 kernels in ")
    assert after.endswith(" s")


def test_kernels_in_the_cache_are_not_news(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    compiled(monkeypatch, "kept")
    with COMPILATIONS.telling():
        compiled(monkeypatch, "kept")
    assert said.messages == []


def test_after_the_start_nothing_is_said(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    compiled(monkeypatch, "four")._cache.flush()
    compiled(monkeypatch, "five")
    assert said.messages == []
