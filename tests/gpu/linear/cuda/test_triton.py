"""The matrix product in Triton against that in float64, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from app.gpu.linear.cuda.triton_matmul import TILE_INPUTS, TILE_OUTPUTS, TILE_ROWS, matmul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}
if DEVICE == "cuda":
    TOLERANCE[torch.bfloat16] = 2e-2  # Triton's interpreter multiplies bfloat16 as the integers of its bits


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 1), (7, 5), (TILE_OUTPUTS, TILE_INPUTS), (TILE_OUTPUTS + 1, 2 * TILE_INPUTS + 3)]
)
@pytest.mark.parametrize("rows", [0, 1, 2, TILE_ROWS, TILE_ROWS + 1])
def test_product(rows: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = draw(rows, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype)
    offset = draw(outputs, dtype=dtype) if bias else None
    y = matmul(x, weight, offset)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    assert (y.dtype, tuple(y.shape)) == (dtype, (rows, outputs))
    scale = inputs**0.5
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


def test_rows_need_not_be_contiguous() -> None:
    x, weight = draw(5, 40, dtype=torch.float32)[:, 8:24], draw(24, 16, dtype=torch.float32)
    torch.testing.assert_close(matmul(x, weight, None), matmul(x.contiguous(), weight, None), rtol=0, atol=0)


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    x, weight = draw(TILE_ROWS + 20, 200, dtype=dtype), draw(70, 200, dtype=dtype)
    alone = torch.cat([matmul(row[None], weight, None) for row in x])
    for first, count in [(0, 2), (3, 16), (0, TILE_ROWS + 20), (7, TILE_ROWS + 1)]:
        together = matmul(x[first : first + count], weight, None)
        torch.testing.assert_close(together, alone[first : first + count], rtol=0, atol=0)
