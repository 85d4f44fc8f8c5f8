"""Layers of 8 bits a weight against products in float64, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from app.gpu.linear import linear_maker
from app.gpu.linear.base import Linear
from app.gpu.linear.cuda.eight_bits_linear import Float8Linear
from app.gpu.linear.cuda.triton_float8 import ROW_TILE, TILE_ROWS, round_rows
from app.gpu.linear.eight_bits import FLOAT8, INT8, float8_parts, quantize
from app.gpu.linear.matrix import BlockMatrix, dense_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("the device has no float8", allow_module_level=True)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}
if DEVICE == "cuda":
    TOLERANCE = {torch.bfloat16: 2e-2}  # of PyTorch's products of float8; the interpreter cannot multiply bfloat16
SHAPES = [(1, 32), (7, 64), (65, 96), (64, 160)]
ROWS = [0, 1, 2, TILE_ROWS, TILE_ROWS + 1]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def blocks(kind: str, outputs: int, inputs: int) -> BlockMatrix:
    return BlockMatrix(kind, quantize(kind, draw(outputs, inputs)), (outputs, inputs))


def layer(weight: BlockMatrix, bias: Tensor | None, dtype: torch.dtype, *, invariant: bool = False) -> Linear:
    """As a GPU has it."""
    maker = linear_maker(torch.device("cuda"), dtype, streamed=False, batch_invariant=invariant)
    return maker(weight, bias)


def rounded(x: Tensor) -> Tensor:
    """Each row as float8, with the least power of two as its scale that brings it within 448."""
    scales = (x.double().abs().amax(1, keepdim=True) / 448).log2().ceil().exp2()
    return (x.double() / scales).to(torch.float8_e4m3fn).double() * scales


def assert_product(y: Tensor, x: Tensor, weight: BlockMatrix, bias: Tensor | None, dtype: torch.dtype) -> None:
    expected = x @ dense_of(weight).double().T + (0 if bias is None else bias.double())
    assert (y.dtype, tuple(y.shape)) == (dtype, (len(x), weight.shape[0]))
    scale = weight.shape[1] ** 0.5
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_product_of_integers(rows: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype) -> None:
    weight, x = blocks(INT8, outputs, inputs), draw(rows, inputs, dtype=dtype)
    bias = draw(outputs, dtype=dtype) if biased else None
    assert_product(layer(weight, bias, dtype)(x), x.double(), weight, bias, dtype)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_product_of_float8(
    rows: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype, invariant: bool
) -> None:
    weight, x = blocks(FLOAT8, outputs, inputs), draw(rows, inputs, dtype=dtype)
    bias = draw(outputs, dtype=dtype) if biased else None
    assert_product(layer(weight, bias, dtype, invariant=invariant)(x), rounded(x), weight, bias, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("inputs", [16, 96, ROW_TILE + 16])
def test_inputs_are_rounded_as_weights_are(inputs: int, dtype: torch.dtype) -> None:
    x = draw(9, inputs, dtype=dtype) * torch.logspace(-3, 3, 9, device=DEVICE, dtype=dtype)[:, None]
    x[4], x[5, 3], x[6, 2] = 0, torch.inf, torch.nan
    numbers, scales = float8_parts(quantize(FLOAT8, x))
    with np.errstate(all="ignore"):  # the interpreter warns where a device does not
        found, found_scales = round_rows(x)
    torch.testing.assert_close(found_scales, scales, rtol=0, atol=0, equal_nan=True)
    finite = scales[:, 0].isfinite()
    assert finite.tolist() == [True] * 5 + [False] * 2 + [True] * 2
    assert torch.equal(found[finite].view(torch.uint8), numbers[finite].view(torch.uint8))


def test_every_float8_is_rounded_to_itself_and_halves_to_even() -> None:
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (grid[1:] + grid[:-1]) / 2
    x = torch.cat([grid, -grid, halves, -halves, halves.nextafter(grid[1:]), halves.nextafter(grid[:-1])])
    found, scales = round_rows(torch.cat([x, x.new_zeros(-len(x) % 16)])[None].to(DEVICE))
    assert scales.item() == 1.0
    assert torch.equal(found[0, : len(x)].cpu().float(), x.to(torch.float8_e4m3fn).float())


def test_rows_need_not_be_contiguous() -> None:
    dtype = next(iter(TOLERANCE))
    x = draw(5, 200, dtype=dtype)[:, 8:72]
    for kind in (INT8, FLOAT8):
        linear = layer(blocks(kind, 24, 64), None, dtype)
        torch.testing.assert_close(linear(x), linear(x.contiguous()), rtol=0, atol=0)


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", [INT8, FLOAT8])
def test_a_row_has_the_same_bits_in_any_batch(kind: str, dtype: torch.dtype) -> None:
    x, linear = draw(TILE_ROWS + 20, 192, dtype=dtype), layer(blocks(kind, 70, 192), None, dtype, invariant=True)
    alone = torch.cat([linear(row[None]) for row in x])
    for first, count in [(0, 2), (3, 16), (0, TILE_ROWS + 20), (7, TILE_ROWS + 1)]:
        torch.testing.assert_close(linear(x[first : first + count]), alone[first : first + count], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [INT8, FLOAT8])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_weight_that_comes_later_has_the_place_that_was_said(kind: str, invariant: bool) -> None:
    dtype = next(iter(TOLERANCE))
    weight, bias, x = blocks(kind, 70, 64), draw(70, dtype=dtype), draw(3, 64, dtype=dtype)
    make: Any = partial(layer, dtype=dtype, invariant=invariant)
    stays, later = make(weight, bias), make(BlockMatrix(kind, weight.rows.to("meta"), weight.shape), bias.to("meta"))
    for cell, came in zip(later.weights, stays.weights, strict=True):
        assert (cell.tensor.shape, cell.tensor.dtype) == (came.tensor.shape, came.tensor.dtype)
        assert came.tensor.is_contiguous()
        cell.tensor = came.tensor
    assert torch.equal(later(x), stays(x))


def test_float8_takes_a_byte_a_weight() -> None:
    numbers, scales = Float8Linear(blocks(FLOAT8, 70, 64)).weights
    assert (numbers.tensor.nbytes, scales.tensor.nbytes) == (80 * 64, 80 * 4)
