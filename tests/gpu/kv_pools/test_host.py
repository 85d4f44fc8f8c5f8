"""Copies between device and host: which bytes of which blocks."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

import app.gpu.kv_pools.host
from app.gpu.attention import attention_for
from app.gpu.device.choice import streams_of
from app.gpu.device.streams import PASSED, CpuStreams
from app.gpu.kv.moves import HalfPass
from app.gpu.kv_pools.device import KVPool
from app.gpu.kv_pools.host import HostPool
from app.gpu.kv_pools.shared import Part, SharedHostPool, open_slab
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from tests.gpu.breakpoints.breaking_models import TinyModel
from tests.gpu.device.deferring import DeferredDevice

BLOCKS, RUN = 12, 1
HALF = HalfPass(3, RUN)
AWAY, THERE = [4, 5, 6, 1, 2, 9], [0, 1, 2, 3, 7, 8]
"""The last three are of a half pass, and two of them are neighbours."""


def fresh_pool(stack: LayerStack, dtype: torch.dtype | None) -> KVPool:
    pool = KVPool(stack, BLOCKS, 4, dtype=dtype)
    data = pool.data.view(torch.uint8)
    data.copy_(torch.randint(256, data.shape, generator=torch.Generator().manual_seed(0)))
    return pool


def bytes_of(pool: KVPool) -> Tensor:
    return pool.data.view(torch.uint8).clone()


def check_half_pass(pool: KVPool, host: HostPool) -> None:
    before = bytes_of(pool)
    host.copy_out(AWAY, THERE, host.now(), HALF)
    copied = host.data[THERE].count_nonzero(dim=1)
    assert copied[3:].max() < copied[:3].min() / 2
    pool.data.view(torch.uint8).zero_()
    host.copy_in(THERE, AWAY, host.now(), HALF)
    after = bytes_of(pool)
    assert torch.equal(after[AWAY[:3]], before[AWAY[:3]])
    assert torch.equal(after[AWAY[3:], :RUN], before[AWAY[3:], :RUN])
    assert not after[AWAY[3:], RUN:].any()
    others = [block for block in range(BLOCKS) if block not in AWAY]
    assert not after[others].any()


@pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_half_pass_is_copied_up_to_its_layer(
    tiny_llama: TinyModel, ranks: int, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = fresh_pool(tiny_llama.stack, dtype)
    monkeypatch.setattr(app.gpu.kv_pools.host, "PIECE_BYTES", 2 * pool.data[0].nbytes)
    slab = open_slab()
    host = HostPool(pool, BLOCKS, CpuStreams())
    if ranks:
        host = SharedHostPool(pool, BLOCKS, CpuStreams(), Part(1, ranks, slab))
    os.close(slab)
    check_half_pass(pool, host)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn])
def test_a_half_pass_crosses_the_link_of_a_gpu(tiny_llama: TinyModel, dtype: torch.dtype | None) -> None:
    device = torch.device("cuda")
    stack = load_stack(tiny_llama.resolved, device=device, dtype=torch.float32, attention=attention_for(device))
    pool = fresh_pool(stack, dtype)
    check_half_pass(pool, HostPool(pool, BLOCKS, streams_of(device)))


@pytest.mark.parametrize(
    ("blocks", "halves", "early"),
    [
        pytest.param(1, 0, 1, id="one"),
        pytest.param(3, 0, 2, id="at most half of them late"),
        pytest.param(4, 0, 2, id="as many late as early"),
        pytest.param(8, 0, 6, id="many"),
        pytest.param(8, 1, 6, id="half a pass and a whole block, with room to spare"),
        pytest.param(8, 2, 5, id="half a pass and a whole block"),
        pytest.param(10, 7, 6, id="only a part of half a pass"),
    ],
)
def test_a_large_move_is_told_of_before_its_last_blocks_have_come(
    tiny_llama: TinyModel, blocks: int, halves: int, early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, pool = DeferredDevice(0, late="to_device"), fresh_pool(tiny_llama.stack, None)
    monkeypatch.setattr(app.gpu.kv_pools.host, "PIECE_BYTES", 1)
    monkeypatch.setattr(HostPool, "late_bytes", 2 * pool.data[0].nbytes)
    host, before = HostPool(pool, BLOCKS, device), bytes_of(pool)
    half = pool.data.shape[1] // 2
    landing = host.copy_in(range(blocks), range(blocks), PASSED, HalfPass(halves, half))
    sizes = [2] * (blocks - halves) + [1] * halves
    assert landing.share == sum(sizes[:early]) / sum(sizes)
    moved = [pool.data.view(torch.uint8)[block, : half * parts] for block, parts in enumerate(sizes)]
    assert not any(each.any() for each in moved[:early])
    assert torch.equal(bytes_of(pool)[early:], before[early:])
    landing.event.synchronize()
    assert not any(each.any() for each in moved)
