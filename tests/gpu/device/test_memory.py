"""A GPU's memory as it is told: only on a GPU."""

from __future__ import annotations

import pytest
import torch

from app.gpu.device.memory import CudaMemory

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
MIB = 1 << 20


def test_free_memory_falls_by_what_is_held() -> None:
    memory = CudaMemory(torch.device("cuda"))
    torch.zeros(1, device="cuda")  # what PyTorch loads for the first one stays
    before, pool = memory.free(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):  # not in a gap between tensors that others have left
        held = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    assert before - memory.free() == pytest.approx(held.nbytes, rel=0.1)
    del held, pool
    assert memory.free() == pytest.approx(before, abs=32 * MIB)
    assert memory.free() < memory.total()


def test_the_peak_is_what_was_held_beyond_what_is_held() -> None:
    memory = CudaMemory(torch.device("cuda"))
    kept = [torch.zeros(128 * MIB, dtype=torch.uint8, device="cuda")]
    memory.reset_peak()
    kept.append(torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda"))  # first: memory for it alone
    torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    assert 224 * MIB <= memory.peak() <= 360 * MIB
    memory.reset_peak()
    assert memory.peak() == 0
