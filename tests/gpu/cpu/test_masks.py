"""Masks of logits on a CPU, against PyTorch's own operator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.gpu.cpu.masks import forbid


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300, 4096])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_only_forbidden_tokens_of_masked_rows_change(vocab_size: int, share: float) -> None:
    random = np.random.default_rng(vocab_size)
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    rows = torch.tensor([5, 0, 7])
    allowed = random.random((3, vocab_size)) < share
    words = np.full((3, -(-vocab_size // 32) * 32), False)
    words[:, :vocab_size] = allowed
    bits = torch.from_numpy(np.packbits(words, axis=1, bitorder="little").view(np.int32))
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~torch.from_numpy(allowed), -torch.inf)
    forbid(logits, rows, bits)
    assert torch.equal(logits, expected)
