"""Masks of logits, against PyTorch's own operator."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from app.gpu.cpu.masks import forbid
from app.gpu.sampling.masks import forbid_on_device

THREADS = 4
ROWS = 16


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Several, which share the rows out."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300, 4096])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_only_forbidden_tokens_of_masked_rows_change(vocab_size: int, share: float) -> None:
    random = np.random.default_rng(vocab_size)
    logits = torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    rows = torch.tensor([5, 0, 15, 3, 7, 9, 1, 12, 2])
    allowed = random.random((len(rows), vocab_size)) < share
    words = np.full((len(rows), -(-vocab_size // 32) * 32), False)
    words[:, :vocab_size] = allowed
    bits = torch.from_numpy(np.packbits(words, axis=1, bitorder="little").view(np.int32))
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~torch.from_numpy(allowed), -torch.inf)
    for apply in (forbid, forbid_on_device):
        masked = logits.clone()
        apply(masked, rows, bits)
        assert torch.equal(masked, expected)
