"""Dense layers against the matrix product in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.linear import linear_maker
from app.gpu.linear.base import Linear
from app.gpu.linear.cpu.packing import to_panels
from app.gpu.linear.dense import DenseLinear
from app.gpu.linear.tiled import tiled_maker

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = [(1, 1), (7, 5), (96, 64), (960, 576), (576, 1536)]


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def make(weight: Tensor, bias: Tensor | None = None, *, streamed: bool = False, invariant: bool = False) -> Linear:
    """The layer of a weight that stays, or of one that has come after the layer was made."""
    maker = linear_maker(CPU, weight.dtype, streamed=streamed, batch_invariant=invariant)
    made = maker(weight, bias)
    if not streamed:
        return made
    linear = maker(weight.to("meta"), None if bias is None else bias.to("meta"))
    for cell, came in zip(linear.weights, made.weights, strict=True):
        assert cell.tensor.shape == came.tensor.shape
        cell.tensor = came.tensor
    return linear


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES[:-1])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 33])
@pytest.mark.parametrize("invariant", [False, True])
def test_product(
    invariant: bool, tokens: int, out_features: int, in_features: int, bias: bool, dtype: torch.dtype
) -> None:
    weight = draw(out_features, in_features, dtype=dtype)
    offset = draw(out_features, dtype=dtype) if bias else None
    x = draw(tokens, in_features, dtype=dtype)
    with torch.inference_mode():
        y = make(weight, offset, invariant=invariant)(x)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    assert y.dtype == dtype
    assert y.shape == (tokens, out_features)
    scale = in_features**0.5
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [*SHAPES, (3072, 576), (1000, 48), (64, 48), (13, 1536)])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_streamed_weight_gives_the_bits_of_one_that_stays(
    invariant: bool, out_features: int, in_features: int, bias: bool, dtype: torch.dtype
) -> None:
    weight = draw(out_features, in_features, dtype=dtype)
    offset = draw(out_features, dtype=dtype) if bias else None
    with torch.inference_mode():
        stays = make(weight, offset, invariant=invariant)
        streamed = make(weight, offset, streamed=True, invariant=invariant)
        for tokens in (0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 257):
            x = draw(tokens, in_features, dtype=dtype)
            assert torch.equal(streamed(x), stays(x)), f"{tokens} tokens"


def test_a_streamed_weight_is_that_which_is_there_when_it_multiplies() -> None:
    x, maker = draw(3, 16, dtype=torch.float32), linear_maker(CPU, torch.float32, streamed=True, batch_invariant=False)
    linear = maker(torch.empty(24, 16, device="meta"))
    [weight] = linear.weights
    for seed in range(3):
        came = torch.randn(24, 16, generator=torch.Generator().manual_seed(seed))
        weight.tensor, _ = to_panels(came)
        torch.testing.assert_close(linear(x), x @ came.T)
    del weight.tensor
    with pytest.raises(AttributeError):
        linear(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_rows_need_not_be_contiguous(tokens: int, streamed: bool, dtype: torch.dtype) -> None:
    linear = make(draw(24, 16, dtype=dtype), streamed=streamed)
    x = draw(tokens, 40, dtype=dtype)[:, 8:24]
    torch.testing.assert_close(linear(x), linear(x.contiguous()), rtol=0, atol=0)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_sizes_are_told(invariant: bool, streamed: bool) -> None:
    weight, bias = draw(24, 16, dtype=torch.float32), draw(24, dtype=torch.float32)
    linear = make(weight, bias, streamed=streamed, invariant=invariant)
    assert (linear.in_features, linear.out_features) == (16, 24)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(
    out_features: int, in_features: int, bias: bool, dtype: torch.dtype
) -> None:
    offset = draw(out_features, dtype=dtype) if bias else None
    x = draw(70, in_features, dtype=dtype)
    with torch.inference_mode():
        linear = make(draw(out_features, in_features, dtype=dtype), offset, invariant=True)
        alone = torch.cat([linear(row[None]) for row in x])
        for batch in (2, 3, 8, 16, 17, 33, 70):
            for first in range(0, 70 - batch, 9):
                torch.testing.assert_close(
                    linear(x[first : first + batch]), alone[first : first + batch], rtol=0, atol=0
                )


def test_a_product_in_which_places_differ_is_found_out_when_it_is_made() -> None:
    class Uneven(DenseLinear):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) + torch.arange(len(x))[:, None]

    with pytest.raises(FieldOutOfRange, match="batch_invariant"):
        tiled_maker(Uneven)(torch.empty(3, 4, device="meta"))
