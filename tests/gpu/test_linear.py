"""Dense layers against the matrix product in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.gpu.linear import make_linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 5), (96, 64), (960, 576)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 33])
def test_product(tokens: int, out_features: int, in_features: int, bias: bool, dtype: torch.dtype) -> None:
    weight = draw(out_features, in_features, dtype=dtype)
    offset = draw(out_features, dtype=dtype) if bias else None
    x = draw(tokens, in_features, dtype=dtype)
    with torch.inference_mode():
        y = make_linear(weight, offset)(x)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    assert y.dtype == dtype
    assert y.shape == (tokens, out_features)
    scale = in_features**0.5
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_need_not_be_contiguous(dtype: torch.dtype) -> None:
    linear = make_linear(draw(24, 16, dtype=dtype))
    x = draw(5, 40, dtype=dtype)[:, 8:24]
    torch.testing.assert_close(linear(x), linear(x.contiguous()), rtol=0, atol=0)


def test_sizes_are_told() -> None:
    linear = make_linear(draw(24, 16, dtype=torch.float32), draw(24, dtype=torch.float32))
    assert (linear.in_features, linear.out_features, linear.bytes) == (16, 24, (24 * 16 + 24) * 4)
