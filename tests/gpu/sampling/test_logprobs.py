"""Log-probabilities on a CUDA device. On a CPU, clients' view of them is held against Transformers."""

from __future__ import annotations

import pytest
import torch

from app.gpu.sampling.logprobs import log_probabilities

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("vocab_size", [67, 5001, 49152, 50257, 128258])
def test_the_bits_of_a_row_do_not_depend_on_its_place(vocab_size: int) -> None:
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    found = log_probabilities(row.cuda().repeat(9, 1))
    assert found.shape == (9, vocab_size)
    assert torch.equal(found, found[:1].expand(9, -1))
    torch.testing.assert_close(found[0].cpu().double(), torch.log_softmax(row.double(), dim=-1), rtol=1e-5, atol=1e-5)
