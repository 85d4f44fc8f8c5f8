"""The fused CPU kernels against PyTorch's own operators in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.gpu.models.elementwise import add_, gelu_, layer_norm, rms_norm, rotate, silu_mul

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
dtypes = st.sampled_from(list(TOLERANCE))
rows = st.integers(1, 70)


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 3).to(dtype)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.is_contiguous()
    error = (found.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[found.dtype]


@settings(max_examples=30)
@given(dtype=dtypes, rows=rows, width=st.sampled_from([1, 5, 64, 576]))
def test_rms_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = random(dtype, rows, width), random(dtype, width)
    assert_same(rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (width,), weight.double(), 1e-5))


@settings(max_examples=30)
@given(dtype=dtypes, rows=rows, heads=st.integers(1, 5), width=st.sampled_from([8, 64]))
def test_rms_norm_of_heads_in_a_slice_of_the_fused_projection(
    dtype: torch.dtype, rows: int, heads: int, width: int
) -> None:
    x, weight = random(dtype, rows, heads + 2, width)[:, :heads], random(dtype, heads, width)
    assert_same(rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (width,), None, 1e-5) * weight.double())


@settings(max_examples=30)
@given(dtype=dtypes, rows=rows, width=st.sampled_from([2, 5, 64, 768]))
def test_layer_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight, bias = random(dtype, rows, width) + 7, random(dtype, width), random(dtype, 1, width)[0]
    x[:, 0] = x[:, 1] + 4  # of two nearly equal numbers PyTorch's own float32 loses as many digits
    expected = F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-5)
    assert_same(layer_norm(x, weight, bias, 1e-5), expected)


@settings(max_examples=30)
@given(dtype=dtypes, rows=rows, width=st.sampled_from([1, 7, 3072]))
def test_gelu(dtype: torch.dtype, rows: int, width: int) -> None:
    x = random(dtype, rows, width)
    expected = F.gelu(x.double(), approximate="tanh")
    assert_same(gelu_(x), expected)


@settings(max_examples=30)
@given(dtype=dtypes, rows=rows, width=st.sampled_from([1, 7, 576]), bias=st.booleans())
def test_add(dtype: torch.dtype, rows: int, width: int, bias: bool) -> None:
    x, other = random(dtype, rows, width), random(dtype, 1 if bias else rows, width)
    expected = x.double() + other.double()
    assert_same(add_(x, other[0] if bias else other), expected)


@settings(max_examples=30)
@given(dtype=dtypes, rows=rows, inner=st.sampled_from([1, 7, 1536]))
def test_silu_mul(dtype: torch.dtype, rows: int, inner: int) -> None:
    gate_up = random(dtype, rows, 2 * inner)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_same(silu_mul(gate_up), F.silu(gate) * up)


@settings(max_examples=30)
@given(dtype=dtypes, rows=rows, heads=st.integers(1, 5), head_dim=st.sampled_from([2, 8, 64, 128]))
def test_rotate_reads_a_slice_of_the_fused_projection(dtype: torch.dtype, rows: int, heads: int, head_dim: int) -> None:
    fused = random(dtype, rows, heads + 2, head_dim)
    table = random(dtype, 50, head_dim)
    positions = torch.arange(rows) * 7 % 50
    cos, sin = table.double()[positions][:, None].chunk(2, dim=-1)
    a, b = fused[:, :heads].double().chunk(2, dim=-1)
    expected = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    assert_same(rotate(fused[:, :heads], table, positions), expected)


@pytest.mark.parametrize("value", [torch.nan, 1e30, -1e30, 0.0])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_silu_mul_of_extreme_values(dtype: torch.dtype, value: float) -> None:
    if dtype == torch.float16 and abs(value) == 1e30:
        value = 60000.0 if value > 0 else -60000.0
    gate_up = torch.tensor([[value, 1.0]], dtype=dtype)
    torch.testing.assert_close(silu_mul(gate_up), F.silu(gate_up[:, :1]) * 1, equal_nan=True)


def test_a_bfloat16_nan_stays_one() -> None:
    x = torch.tensor([[torch.nan, 1.0]], dtype=torch.bfloat16)
    assert rms_norm(x, torch.ones(2, dtype=torch.bfloat16), 1e-5).isnan().all()
