"""Rounding matrices to 8 bits: integers as gguf has them, float8 to the nearest number."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch import Tensor

from app.gpu.linear.eight_bits import FLOAT8, INT8, dequantize, float8_parts, quantize, row_bytes
from app.gpu.linear.float8 import round_to_float8
from app.gpu.linear.matrix import BlockMatrix, dense_of, look_up, split, stack

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def draw(rows: int, inputs: int) -> Tensor:
    """Rows of very different sizes, one of zeros, and blocks whose numbers lie halfway between integers."""
    values = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows + inputs))
    values *= torch.logspace(-6, 4, rows)[:, None]
    values[0] = 0
    values[-1] = torch.arange(inputs) % 128 - 63.5
    values[-1, ::32] = 127
    return values


@pytest.mark.parametrize("shape", [(3, 32), (40, 96), (5000, 64)])
def test_integers_are_those_of_gguf(shape: tuple[int, int]) -> None:
    values = draw(*shape)
    rows = quantize(INT8, values)
    assert torch.equal(rows, torch.from_numpy(gguf.quants.quantize(values.numpy(), Q8_0)))
    assert torch.equal(dequantize(INT8, rows), torch.from_numpy(gguf.quants.dequantize(rows.numpy(), Q8_0)))


def test_a_number_becomes_the_nearest_float8() -> None:
    values = draw(40, 96)
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


@pytest.mark.parametrize("kind", [INT8, FLOAT8])
def test_rows_are_told_apart_and_joined(kind: str) -> None:
    values = draw(40, 96)
    matrix = BlockMatrix(kind, quantize(kind, values), (40, 96))
    parts = [BlockMatrix(kind, quantize(kind, part), (len(part), 96)) for part in values.split(17)]
    whole = dense_of(matrix)
    assert torch.equal(dense_of(stack(parts)), whole)
    assert torch.equal(torch.cat([dense_of(each) for each in split(matrix, 9)]), whole)
    assert torch.equal(look_up(matrix, torch.tensor([7, 0, 7])), whole[[7, 0, 7]])


@pytest.mark.parametrize("kind", [INT8, FLOAT8])
def test_the_size_is_known_on_meta(kind: str) -> None:
    rows = quantize(kind, torch.empty(40, 96, dtype=torch.bfloat16, device="meta"))
    assert tuple(rows.shape) == (40, row_bytes(kind, 96)) == tuple(quantize(kind, draw(40, 96)).shape)
    assert tuple(dequantize(kind, rows).shape) == (40, 96)
