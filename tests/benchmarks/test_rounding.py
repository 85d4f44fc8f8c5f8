"""What rounding loses, by PyTorch's own measures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical, kl_divergence

from app.gpu.linear.eight_bits import FLOAT8, quantize
from app.gpu.linear.matrix import BlockMatrix
from benchmarks.rounding import Float8OnCpu, compare


def test_the_loss_is_that_of_pytorch() -> None:
    generator = torch.Generator().manual_seed(0)
    windows = [[3, 1, 4, 1, 5], [9, 2, 6]]
    exact = [torch.randn(len(each), 10, generator=generator) for each in windows]
    found = [each + torch.randn(each.shape, generator=generator) / 2 for each in exact]
    loss = compare([each.log_softmax(1) for each in found], [each.log_softmax(1) for each in exact], windows)
    theirs, ours = torch.cat(exact), torch.cat(found)
    assert loss.kl == pytest.approx(float(kl_divergence(Categorical(logits=theirs), Categorical(logits=ours)).mean()))

    def perplexity(logits: list[torch.Tensor]) -> float:
        said = torch.cat([each[:-1] for each in logits])
        return float(F.cross_entropy(said, torch.tensor([token for each in windows for token in each[1:]])).exp())

    assert loss.perplexity == pytest.approx(perplexity(found) / perplexity(exact))
    assert loss.agreement == pytest.approx(float((theirs.argmax(1) == ours.argmax(1)).double().mean()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels take no tensors of a CPU")
def test_float8_on_a_cpu_is_the_float8_of_a_gpu() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from app.gpu.linear.cuda.eight_bits_linear import Float8Linear

    generator = torch.Generator().manual_seed(2)
    values, x = torch.randn(48, 64, generator=generator), torch.randn(5, 64, generator=generator)
    weight, bias = BlockMatrix(FLOAT8, quantize(FLOAT8, values), (48, 64)), torch.randn(48, generator=generator)
    torch.testing.assert_close(Float8OnCpu(weight, bias)(x), Float8Linear(weight, bias)(x))
