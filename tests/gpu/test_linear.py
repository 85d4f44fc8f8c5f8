"""Dense layers against the matrix product in float64."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from app.errors import FieldOutOfRange
from app.gpu.linear import Linear, MakeLinear, TiledLinear, make_batch_invariant_linear, make_linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 5), (96, 64), (960, 576)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 33])
@pytest.mark.parametrize("make", [make_linear, make_batch_invariant_linear])
def test_product(
    make: MakeLinear, tokens: int, out_features: int, in_features: int, bias: bool, dtype: torch.dtype
) -> None:
    weight = draw(out_features, in_features, dtype=dtype)
    offset = draw(out_features, dtype=dtype) if bias else None
    x = draw(tokens, in_features, dtype=dtype)
    with torch.inference_mode():
        y = make(weight, offset)(x)
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


@pytest.mark.parametrize("make", [make_linear, make_batch_invariant_linear])
def test_sizes_are_told(make: MakeLinear) -> None:
    linear = make(draw(24, 16, dtype=torch.float32), draw(24, dtype=torch.float32))
    assert (linear.in_features, linear.out_features, linear.bytes) == (16, 24, (24 * 16 + 24) * 4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 5), (96, 64), (960, 576), (576, 1536)])
def test_a_row_has_the_same_bits_in_any_batch(
    out_features: int, in_features: int, bias: bool, dtype: torch.dtype
) -> None:
    offset = draw(out_features, dtype=dtype) if bias else None
    x = draw(70, in_features, dtype=dtype)
    with torch.inference_mode():
        linear = make_batch_invariant_linear(draw(out_features, in_features, dtype=dtype), offset)
        alone = torch.cat([linear(row[None]) for row in x])
        for batch in (2, 3, 8, 16, 17, 33, 70):
            for first in range(0, 70 - batch, 9):
                torch.testing.assert_close(
                    linear(x[first : first + batch]), alone[first : first + batch], rtol=0, atol=0
                )


def test_a_product_in_which_places_differ_is_found_out_when_it_is_made() -> None:
    uneven = Mock(in_features=4, out_features=3, bytes=48)
    uneven.side_effect = lambda x: x[:, :3] + torch.arange(len(x))[:, None]
    linear: Linear = uneven
    with pytest.raises(FieldOutOfRange, match="batch_invariant"):
        TiledLinear(linear, torch.float32)
