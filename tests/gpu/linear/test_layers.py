"""Dense layers of a CPU against the matrix product in float64, and matrices in blocks, as gguf has them or rounded to 8
bits: integers as gguf rounds them, float8 to the nearest.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.linear import linear_maker
from app.gpu.linear.base import Linear
from app.gpu.linear.dense import DenseLinear
from app.gpu.linear.eight_bits import FLOAT8, INT8, dequantize, float8_parts, quantize, row_bytes
from app.gpu.linear.float8 import round_to_float8
from app.gpu.linear.matrix import BlockMatrix, dense_of, look_up, split, stack
from app.gpu.linear.tiled import tiled_maker

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = [(1, 1), (7, 5), (96, 64), (576, 1536)]


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
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@torch.inference_mode()
def test_a_product_and_the_bits_of_a_streamed_weight(
    outputs: int, inputs: int, invariant: bool, dtype: torch.dtype
) -> None:
    weight = draw(outputs, inputs, dtype=dtype)
    for bias in (None, draw(outputs, dtype=dtype)):
        stays, streamed = (make(weight, bias, streamed=each, invariant=invariant) for each in (False, True))
        assert (stays.in_features, stays.out_features) == (streamed.in_features, streamed.out_features)
        assert (stays.in_features, stays.out_features) == (inputs, outputs)
        for tokens in (0, 1, 2, 3, 8, 15, 16, 17, 33, 100):
            x = draw(tokens, inputs, dtype=dtype)
            y = stays(x)
            expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            assert y.dtype == dtype
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * inputs**0.5)
            assert torch.equal(streamed(x), y), f"{tokens} tokens"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_rows_of_a_half_type_need_not_be_contiguous(tokens: int, streamed: bool) -> None:
    linear = make(draw(24, 16, dtype=torch.bfloat16), streamed=streamed)
    x = draw(tokens, 40, dtype=torch.bfloat16)[:, 8:24]
    torch.testing.assert_close(linear(x), linear(x.contiguous()), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES[1:])
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_batch(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x = draw(70, inputs, dtype=dtype)
    linear = make(draw(outputs, inputs, dtype=dtype), draw(outputs, dtype=dtype), invariant=True)
    alone = torch.cat([linear(row[None]) for row in x])
    for batch in (2, 3, 8, 16, 17, 33, 70):
        for first in range(0, 70 - batch, 9):
            found = linear(x[first : first + batch])
            torch.testing.assert_close(found, alone[first : first + batch], rtol=0, atol=0)


def test_a_product_in_which_places_differ_is_found_out_when_it_is_made() -> None:
    class Uneven(DenseLinear):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) + torch.arange(len(x))[:, None]

    with pytest.raises(FieldOutOfRange, match="batch_invariant"):
        tiled_maker(Uneven)(torch.empty(3, 4, device="meta"))


def draw_uneven(rows: int, inputs: int) -> Tensor:
    """Rows of very different sizes, one of zeros, and blocks whose numbers lie halfway between integers."""
    values = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows + inputs))
    values *= torch.logspace(-6, 4, rows)[:, None]
    values[0] = 0
    values[-1] = torch.arange(inputs) % 128 - 63.5
    values[-1, ::32] = 127
    return values


def blocks(kind: str, values: Tensor) -> BlockMatrix:
    if kind in (INT8, FLOAT8):
        rows = quantize(kind, values)
    else:
        rows = torch.from_numpy(gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[kind]))
    return BlockMatrix(kind, rows, (values.shape[0], values.shape[1]))


@pytest.mark.parametrize("shape", [(3, 32), (40, 96), (5000, 64)])
def test_integers_are_those_of_gguf(shape: tuple[int, int]) -> None:
    values, kind = draw_uneven(*shape), gguf.GGMLQuantizationType.Q8_0
    rows = quantize(INT8, values)
    assert torch.equal(rows, torch.from_numpy(gguf.quants.quantize(values.numpy(), kind)))
    assert torch.equal(dequantize(INT8, rows), torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind)))


def test_a_number_becomes_the_nearest_float8() -> None:
    values = draw_uneven(40, 96)
    numbers, scales = float8_parts(quantize(FLOAT8, values))
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid = grid[grid.isfinite()]
    for row, found, scale in zip(values.double(), numbers.double(), scales.double(), strict=True):
        assert torch.equal((row - found * scale).abs(), (row[:, None] - grid * scale).abs().min(1).values)


def test_a_scale_is_the_least_power_of_two_that_holds_the_row() -> None:
    peaks = torch.tensor([448.0, 448.01, 1.75, 1.7500001, 0.0, 3e38, 1e-37])
    _, scales = round_to_float8(peaks[:, None] * torch.tensor([0.5, -1.0]))
    assert torch.equal(scales[:, 0].log2() % 1, torch.zeros(7))
    assert scales[:4, 0].tolist() == [1.0, 2.0, 2.0**-8, 2.0**-7]
    assert (peaks <= 448 * scales[:, 0].double()).all()
    assert (peaks[:6] > 224 * scales[:6, 0].double())[[0, 1, 2, 3, 5]].all()


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_a_row_with_a_number_that_is_not_finite_is_not_a_number(odd: float) -> None:
    values = torch.tensor([[1.0, odd], [1.0, 2.0]])
    found = dequantize(FLOAT8, quantize(FLOAT8, values.repeat(1, 8)))
    assert found[0].isnan().all()
    assert torch.equal(found[1], values[1].repeat(8))


@pytest.mark.parametrize("kind", [INT8, FLOAT8, "Q4_0", "Q4_1"])
def test_rows_are_told_apart_and_joined(kind: str) -> None:
    values = torch.from_numpy(np.random.default_rng(1).normal(size=(40, 96)).astype(np.float32))
    matrix = blocks(kind, values)
    whole = dense_of(matrix)
    assert torch.equal(dense_of(stack([blocks(kind, part) for part in values.split(17)])), whole)
    assert torch.equal(torch.cat([dense_of(each) for each in split(matrix, 9)]), whole)
    assert torch.equal(look_up(matrix, torch.tensor([7, 0, 7])), whole[[7, 0, 7]])


def test_what_is_joined_keeps_its_type_where_all_have_it_and_becomes_float32_elsewhere() -> None:
    halves = [torch.randn(2, 64).bfloat16(), torch.randn(3, 64).bfloat16()]
    joined = dense_of(stack(halves))
    assert joined.dtype is torch.bfloat16
    assert torch.equal(joined, torch.cat(halves))
    for other in (torch.ones(1, 64), blocks("Q4_1", draw_uneven(4, 64))):
        mixed = stack([halves[0], other])
        assert torch.equal(dense_of(mixed), torch.cat([halves[0].float(), dense_of(other)]))
    mixed = stack([blocks("Q4_1", draw_uneven(4, 64)), blocks("Q8_0", draw_uneven(4, 64))])
    assert not isinstance(mixed, BlockMatrix)


@pytest.mark.parametrize("kind", [INT8, FLOAT8])
def test_the_size_is_known_on_meta(kind: str) -> None:
    rows = quantize(kind, torch.empty(40, 96, dtype=torch.bfloat16, device="meta"))
    assert tuple(rows.shape) == (40, row_bytes(kind, 96)) == tuple(quantize(kind, draw_uneven(40, 96)).shape)
    assert tuple(dequantize(kind, rows).shape) == (40, 96)
