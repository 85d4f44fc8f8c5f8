"""MatmulPrecision on CUDA against those in float64, in Triton's interpreter where there is no GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from app.gpu.kernels.linear import linear_maker
from app.gpu.kernels.linear.base import BlockMatrix, Linear, dense_of
from app.gpu.kernels.linear.encodings import FLOAT8, INT8, Grouped, float8_parts, quantize
from app.gpu.kernels.linear.triton_matmul import (
    ROW_TILE,
    TILE_INPUTS,
    TILE_OUTPUTS,
    TILE_ROWS,
    VECTOR_TILE,
    WIDE_VECTOR_TILE,
    matmul,
    matvec,
    round_rows,
)
from tests.gpu.kernels.linear.blocks import GROUPED, draw_groups
from tests.gpu.tiny_engine import rounded

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {FLOAT32: 1e-5, FLOAT16: 3e-3, BFLOAT16: 2e-2}
NARROW = BFLOAT16 if ON_GPU else FLOAT16
"""The interpreter cannot multiply bfloat16, and PyTorch's products of float8 become nothing else."""
has_float8 = not ON_GPU or torch.cuda.get_device_capability() >= (8, 9)
KINDS = [
    INT8,
    *GROUPED,
    pytest.param(FLOAT8, marks=pytest.mark.skipif(not has_float8, reason="the device has no float8")),
]
DENSE_SHAPES = [(1, 1), (7, 5), (TILE_OUTPUTS, TILE_INPUTS), (TILE_OUTPUTS + 1, 2 * TILE_INPUTS + 3)]
BLOCK_SHAPES = [(1, 32), (7, 64), (65, 96), (64, 160)]
ROWS = [0, 1, 2, TILE_ROWS, TILE_ROWS + 1]


def draw(*shape: int, dtype: torch.dtype = FLOAT32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def blocks(kind: str, outputs: int, inputs: int) -> BlockMatrix:
    if kind in GROUPED:
        matrix = draw_groups(kind, outputs, inputs)
        return BlockMatrix(matrix.kind, matrix.rows.to(DEVICE), matrix.shape)
    return BlockMatrix(kind, quantize(kind, draw(outputs, inputs)), (outputs, inputs))


def layer(weight: BlockMatrix, bias: Tensor | None, dtype: torch.dtype, *, invariant: bool = False) -> Linear:
    maker = linear_maker(torch.device("cuda"), dtype, batch_invariant=invariant)
    return maker(weight, bias, 1)


def assert_product(
    y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, kind: str | Grouped = ""
) -> None:
    """The interpreter cuts weights in groups of `kind` to bfloat16, which a device rounds to it."""
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (y.dtype, y.shape) == (dtype, expected.shape)
    tolerance = max(TOLERANCE[each] for each in (dtype, getattr(kind, "values", dtype)))
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * weight.shape[1] ** 0.5)


@pytest.mark.parametrize("dtype", [FLOAT32, NARROW], ids=str)
@pytest.mark.parametrize(
    "shape", [*(pytest.param(each, marks=pytest.mark.long) for each in DENSE_SHAPES[:-1]), DENSE_SHAPES[-1]]
)
def test_dense_products(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = draw(*shape, dtype=dtype), draw(shape[0], dtype=dtype)
    for rows in ROWS:
        x, offset = draw(rows, shape[1], dtype=dtype), bias if rows % 2 else None
        assert_product(matmul(x, weight, offset), x, weight, offset, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 1), (7, 5), (3, VECTOR_TILE), (2, 2 * WIDE_VECTOR_TILE), (2, 2 * VECTOR_TILE + 3)]
)
def test_products_of_one_row(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = draw(1, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype)
    for bias in (None, draw(outputs, dtype=dtype)):
        assert_product(matvec(x, weight, bias), x, weight, bias, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("invariant", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", [pytest.param(FLOAT32, marks=pytest.mark.long), NARROW], ids=str)
@pytest.mark.parametrize(
    "shape", [*(pytest.param(each, marks=pytest.mark.long) for each in BLOCK_SHAPES[:-1]), BLOCK_SHAPES[-1]]
)
def test_products_of_few_bits(shape: tuple[int, int], dtype: torch.dtype, invariant: bool, kind: str) -> None:
    """The inputs of float8 are rounded too."""
    if ON_GPU and dtype is FLOAT32:
        pytest.skip("PyTorch's products of float8 are bfloat16")
    weight, bias = blocks(kind, *shape), draw(shape[0], dtype=dtype)
    for rows in ROWS:
        x, offset = draw(rows, shape[1], dtype=dtype), bias if rows % 2 else None
        y = layer(weight, offset, dtype, invariant=invariant)(x)
        x = rounded(x.double(), torch.float8_e4m3fn) if kind == FLOAT8 else x
        assert_product(y, x, dense_of(weight), offset, dtype, weight.kind)


@pytest.mark.skipif(not has_float8, reason="the device has no float8")
@pytest.mark.parametrize("inputs", [16, ROW_TILE + 16])
def test_inputs_are_rounded_as_weights_are(inputs: int) -> None:
    x = draw(9, inputs, dtype=NARROW) * torch.logspace(-3, 3, 9, device=DEVICE, dtype=NARROW)[:, None]
    x[4], x[5, 3], x[6, 2] = 0, torch.inf, torch.nan
    numbers, scales = float8_parts(quantize(FLOAT8, x))
    with np.errstate(all="ignore"):  # the interpreter warns where a device does not
        found, found_scales = round_rows(x)
    torch.testing.assert_close(found_scales, scales, rtol=0, atol=0, equal_nan=True)
    finite = scales[:, 0].isfinite()
    assert finite.tolist() == [True] * 5 + [False] * 2 + [True] * 2
    assert torch.equal(found[finite].view(torch.uint8), numbers[finite].view(torch.uint8))


@pytest.mark.skipif(not has_float8, reason="the device has no float8")
def test_every_float8_is_rounded_to_itself_and_halves_to_even() -> None:
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (grid[1:] + grid[:-1]) / 2
    x = torch.cat([grid, -grid, halves, -halves, halves.nextafter(grid[1:]), halves.nextafter(grid[:-1])])
    found, scales = round_rows(torch.cat([x, x.new_zeros(-len(x) % 16)])[None].to(DEVICE))
    assert scales.item() == 1.0
    assert torch.equal(found[0, : len(x)].cpu().float(), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_rows_need_not_be_contiguous(kind: str | None) -> None:
    wide = draw(5, 200, dtype=NARROW)
    weight = draw(24, 100, dtype=NARROW)[:, 4:68]
    for rows in (1, 5):
        x = wide[:rows, 8:72]
        linear: Any = layer(blocks(kind, 24, 64), None, NARROW) if kind else lambda x: matmul(x, weight, None)
        torch.testing.assert_close(linear(x), linear(x.contiguous()), rtol=0, atol=0)
    found, wanted = matvec(wide[:1, 8:72], weight, None), matvec(wide[:1, 8:72].contiguous(), weight.contiguous(), None)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_a_row_has_the_same_bits_in_any_batch(kind: str | None) -> None:
    dense = draw(70, 192, dtype=NARROW)
    linear: Any = lambda x: matmul(x, dense, None)  # noqa: E731
    if kind:
        linear = layer(blocks(kind, 70, 192), None, NARROW, invariant=True)
    x = draw(TILE_ROWS + 20, 192, dtype=NARROW)
    alone = {row: linear(x[row : row + 1])[0] for row in (0, 1, 12, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 19)}
    for first, count in [(0, 2), (3, 16), (0, TILE_ROWS + 20), (7, TILE_ROWS + 1)]:
        together = linear(x[first : first + count])
        for row in set(alone) & set(range(first, first + count)):
            torch.testing.assert_close(together[row - first], alone[row], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("invariant", [False, True])
def test_a_weight_that_comes_later_has_the_place_that_was_said(kind: str, invariant: bool) -> None:
    weight, bias, x = blocks(kind, 70, 64), draw(70, dtype=NARROW), draw(3, 64, dtype=NARROW)
    outline = BlockMatrix(weight.kind, weight.rows.to("meta"), weight.shape)
    stays = layer(weight, bias, NARROW, invariant=invariant)
    later = layer(outline, bias.to("meta"), NARROW, invariant=invariant)
    for cell, came in zip(later.weights, stays.weights, strict=True):
        assert (cell.tensor.shape, cell.tensor.dtype) == (came.tensor.shape, came.tensor.dtype)
        assert came.tensor.is_contiguous()
        cell.tensor = came.tensor
    assert torch.equal(later(x), stays(x))
