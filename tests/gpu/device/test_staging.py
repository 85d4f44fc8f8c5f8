"""A step's arrays on their way to the device, blocks on their way between the pools, and memory that is pinned."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

import app.gpu.kv_pools.host
from app.domain.errors import FieldOutOfRange
from app.gpu.device.cuda import CudaStreams
from app.gpu.device.memory import allocating
from app.gpu.device.staging import PAGE_BYTES, Staging
from app.gpu.device.streams import PASSED, WHOLE, CpuStream, CpuStreams, Run
from app.gpu.kv_pools.device import KVPool
from app.gpu.kv_pools.host import HostPool
from tests.gpu.breakpoints.breaking_models import TinyModel

CPU = torch.device("cpu")


class CountingStream(CpuStream):
    """Notes how many bytes each copy has."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def copy(self, target: Tensor, source: Tensor, runs: Iterable[Run] = WHOLE) -> None:
        for write, read in runs:
            self.sizes.append(source[read].nbytes)
            super().copy(target, source, [(write, read)])


def counting_streams() -> tuple[CpuStreams, CountingStream]:
    """Streams, all of whose copies are noted in one."""
    streams, counting = CpuStreams(), CountingStream()
    streams.compute = streams.to_host = streams.to_device = counting
    return streams, counting


def arrays(seed: int, tokens: int) -> list[np.ndarray[Any, Any]]:
    chooser = np.random.default_rng(seed)
    return [
        chooser.integers(0, 1 << 40, tokens),
        chooser.integers(0, 1 << 20, (3, 5), dtype=np.int32),
        np.zeros(0, np.int64),
        chooser.random((tokens, 1), np.float32),
        chooser.random((2, 1)),
    ]


def assert_arrives(staging: Staging, sent: list[np.ndarray[Any, Any]]) -> None:
    staging.begin()
    placed = [staging.put(array) for array in sent]
    staging.send()
    for tensor, array in zip(placed, sent, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % 16 == 0


def test_what_is_put_arrives_in_one_copy() -> None:
    streams, counting = counting_streams()
    staging = Staging(streams, CPU)
    for seed, tokens in enumerate((1, 7, 1000)):
        assert_arrives(staging, arrays(seed, tokens))
    assert len(counting.sizes) == 3


def test_a_step_that_is_larger_than_any_before_takes_more_copies_once() -> None:
    streams, counting = counting_streams()
    staging = Staging(streams, CPU)
    for seed, copies in ((0, 3), (1, 1), (2, 1)):
        counting.sizes.clear()
        assert_arrives(staging, [*arrays(seed, PAGE_BYTES // 6), *arrays(seed, 10)])
        assert len(counting.sizes) == copies


def test_a_step_that_was_given_up_leaves_nothing_behind() -> None:
    staging = Staging(CpuStreams(), CPU)
    staging.begin()
    for seed in range(3):
        staging.put(np.full(PAGE_BYTES // 8, seed))
    assert_arrives(staging, arrays(0, 10))


def test_blocks_go_out_and_come_back_in_pieces_that_leave_gaps_for_others(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, (streams, counting) = KVPool(tiny_llama.stack, 24, 4), counting_streams()
    pool.data.normal_(generator=torch.Generator().manual_seed(0))
    block_bytes = pool.data[0].nbytes
    monkeypatch.setattr(app.gpu.kv_pools.host, "PIECE_BYTES", 3 * block_bytes + 1)
    host, before = HostPool(pool, 40, streams), pool.data.clone()
    scattered = random.Random(0).sample(range(24), 24)
    for source, target in ((list(range(24)), list(range(5, 29))), (scattered, list(range(24)))):
        counting.sizes.clear()
        host.copy_out(source, target, PASSED)
        pool.data.zero_()
        host.copy_in(target, source, PASSED)
        assert torch.equal(pool.data, before)
        assert max(counting.sizes) <= 3 * block_bytes
        assert sum(counting.sizes) == 2 * before.nbytes
    assert len(counting.sizes) > 16
    counting.sizes.clear()
    host.copy_out(range(24), range(24), PASSED)
    assert len(counting.sizes) == 8


SIZE = 64 << 20


def runtime(code: int) -> SimpleNamespace:
    """CUDA's, as far as pinning goes. It refuses with `code` unless that is 0."""
    return SimpleNamespace(cudaHostRegister=lambda *_: code, cudaHostUnregister=lambda *_: 0)


def test_memory_that_cannot_be_pinned_or_is_not_there_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: CudaStreams = CudaStreams.__new__(CudaStreams)  # its streams would need a device
    shape, free = (SIZE >> 20, 1 << 20), psutil.virtual_memory()._replace(available=SIZE - 1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime(0))
    slab = streams.host_slab(shape)
    assert slab.nbytes == SIZE
    assert not slab.any()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime(2))
    with pytest.raises(FieldOutOfRange, match="CUDA error 2") as refused, allocating("kv_host", SIZE):
        streams.host_slab(shape)
    assert refused.value.param == "kv_host"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(FieldOutOfRange, match="more than is free") as refused, allocating("kv_host", SIZE):
        streams.host_slab(shape)
    assert refused.value.param == "kv_host"
