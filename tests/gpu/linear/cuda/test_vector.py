"""The product of one row in Triton against that in float64, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from app.gpu.linear.cuda import triton_vector
from app.gpu.linear.cuda.triton_vector import TILE, WIDE_TILE, matvec
from app.gpu.linear.dense import DenseLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""The interpreter cuts float32 to bfloat16 instead of rounding it."""


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 5), (3, TILE), (2, 2 * WIDE_TILE), (2, 2 * TILE + 3)])
def test_product(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = draw(1, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype)
    offset = draw(outputs, dtype=dtype) if bias else None
    y = matvec(x, weight, offset)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    assert (y.dtype, tuple(y.shape)) == (dtype, (1, outputs))
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * inputs**0.5)


def test_rows_need_not_be_contiguous() -> None:
    x, weight = draw(1, 40, dtype=torch.float32)[:, 8:24], draw(24, 40, dtype=torch.float32)[:, 4:20]
    torch.testing.assert_close(
        matvec(x, weight, None), matvec(x.contiguous(), weight.contiguous(), None), rtol=0, atol=0
    )


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_layer_on_cuda_gives_a_row_alone_what_it_gives_it_among_others(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def counted(row: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        calls.append(len(row))
        return matvec(row, weight, bias)

    monkeypatch.setattr(triton_vector, "matvec", counted)
    x, layer = draw(9, 600, dtype=dtype), DenseLinear(draw(300, 600, dtype=dtype))
    alone = torch.cat([layer(row[None]) for row in x])
    together = layer(x)
    assert calls == [1] * 9
    torch.testing.assert_close(alone, together, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 600**0.5)
