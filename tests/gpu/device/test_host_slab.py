"""The host tier's pinned memory, up to the call that pins it: what CUDA is given, and what it may refuse."""

from __future__ import annotations

import psutil
import pytest
import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.device.cuda import CudaStreams
from app.gpu.device.memory import allocating

SIZE = 64 << 20


class Runtime:
    """CUDA's runtime as far as pinning goes. It refuses with `code` unless that is 0."""

    def __init__(self, code: int = 0) -> None:
        self._code = code
        self._before = resident()
        self.grown = 0
        """Bytes that the process had more of when it pinned them."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.grown = resident() - self._before
        return self._code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0


def resident() -> int:
    """Bytes of this process that the machine has given it."""
    size: int = psutil.Process().memory_info().rss
    return size


def make_slab(size: int) -> Tensor:
    streams: CudaStreams = CudaStreams.__new__(CudaStreams)  # its streams would need a device
    return streams.host_slab((size >> 20, 1 << 20))


def test_memory_is_there_before_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    slab = make_slab(SIZE)
    assert runtime.grown > 0.9 * SIZE
    assert slab.nbytes == SIZE
    assert not slab.any()


def test_memory_that_cannot_be_pinned_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(code=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(FieldOutOfRange, match="CUDA error 2") as refused, allocating("kv_host", SIZE):
        make_slab(SIZE)
    assert refused.value.param == "kv_host"


def test_more_memory_than_is_free_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    free = psutil.virtual_memory()._replace(available=SIZE - 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(FieldOutOfRange, match="more than is free") as refused, allocating("kv_host", SIZE):
        make_slab(SIZE)
    assert refused.value.param == "kv_host"
