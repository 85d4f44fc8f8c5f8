"""The fused CUDA kernels against PyTorch's own operators in float64: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from app.gpu.models.triton_elementwise import add_rms_norm, rms_norm, rotate, silu_mul

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4}
"""The interpreter cuts float32 to bfloat16 instead of rounding it."""
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
rows = pytest.mark.parametrize("rows", [1, 7])


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 3).to(DEVICE, dtype)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.is_contiguous()
    assert (found.double() - expected).norm() / expected.norm() < TOLERANCE[found.dtype]


@dtypes
@rows
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (5, 64), (3, 80), (40, 128)])
def test_rotate_reads_a_slice_of_the_fused_projection(dtype: torch.dtype, rows: int, heads: int, head_dim: int) -> None:
    fused, table = random(dtype, rows, heads + 2, head_dim), random(dtype, 50, head_dim)
    positions = torch.arange(rows, device=DEVICE) * 7 % 50
    cos, sin = table.double()[positions][:, None].chunk(2, dim=-1)
    a, b = fused[:, :heads].double().chunk(2, dim=-1)
    expected = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    assert_same(rotate(fused[:, :heads], table, positions), expected)


@dtypes
@rows
@pytest.mark.parametrize("inner", [1, 1024, 1536])
def test_silu_mul(dtype: torch.dtype, rows: int, inner: int) -> None:
    gate_up = random(dtype, rows, 2 * inner)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_same(silu_mul(gate_up), F.silu(gate) * up)


@dtypes
def test_silu_mul_of_extreme_values(dtype: torch.dtype) -> None:
    most = 60000.0 if dtype == torch.float16 else 1e30
    gate_up = torch.tensor([[most, -most, 0.0, torch.nan, 1.0, 1.0, 1.0, 1.0]], dtype=dtype, device=DEVICE)
    expected = F.silu(gate_up[:, :4].float()).to(dtype)
    torch.testing.assert_close(silu_mul(gate_up), expected, equal_nan=True)


@dtypes
@rows
@pytest.mark.parametrize("width", [1, 576, 4096])
def test_rms_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = random(dtype, rows, width + 1)[:, :width], random(dtype, width)
    assert_same(rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (width,), weight.double(), 1e-5))


@dtypes
@rows
def test_rms_norm_of_heads_in_a_slice_of_the_fused_projection(dtype: torch.dtype, rows: int) -> None:
    heads, width = 3, 80
    x, weight = random(dtype, rows, heads + 2, width)[:, :heads], random(dtype, heads, width)
    expected = F.rms_norm(x.double(), (width,), None, 1e-5) * weight.double()
    assert_same(rms_norm(x, weight, 1e-5), expected)


@dtypes
@rows
@pytest.mark.parametrize("width", [1, 576, 4096])
def test_add_rms_norm_norms_the_sum_that_it_stores(dtype: torch.dtype, rows: int, width: int) -> None:
    x, other, weight = random(dtype, rows, width), random(dtype, rows, width + 1)[:, :width], random(dtype, width)
    expected = (x.double() + other.double()).to(dtype)
    total, normed = add_rms_norm(x, other, weight, 1e-5)
    assert total is x
    torch.testing.assert_close(total, expected)
    assert_same(normed, F.rms_norm(total.double(), (width,), weight.double(), 1e-5))


def test_rows_do_not_depend_on_each_other() -> None:
    x, other, weight = random(torch.float32, 5, 96), random(torch.float32, 5, 96), random(torch.float32, 96)
    alone = [add_rms_norm(x[row : row + 1].clone(), other[row : row + 1], weight, 1e-5) for row in range(5)]
    together = add_rms_norm(x, other, weight, 1e-5)
    for part, whole in zip(zip(*alone, strict=True), together, strict=True):
        assert torch.equal(torch.cat(part), whole)
