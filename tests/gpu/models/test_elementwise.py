"""The fused kernels of a CPU, and those of a GPU, against PyTorch's own operators in float64. Without a GPU the latter
run in Triton's interpreter.
"""

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.models import elementwise
from tests.gpu.kernels.attention.drawing import needs_triton

TRITON = "triton_elementwise"
BFLOAT16 = {"elementwise": 4e-3, TRITON: 8e-3}
"""The interpreter cuts float32 to bfloat16 instead of rounding it."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ROWS = [(torch.float32, 40), (torch.bfloat16, 7), (torch.float16, 1), (torch.float16, 40)]
dtypes_and_rows = pytest.mark.parametrize(("dtype", "rows"), ROWS)


class Kernels:
    """Those of one module, and tensors on the device that they are for."""

    def __init__(self, module: str) -> None:
        self.run: Any = import_module(f"app.gpu.models.{module}")
        self.device = torch.device("cuda" if module == TRITON and torch.cuda.is_available() else "cpu")
        self._tolerance = {torch.float32: 1e-6, torch.bfloat16: BFLOAT16[module], torch.float16: 5e-4}

    def random(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 3).to(self.device, dtype)

    def assert_same(self, found: Tensor, expected: Tensor) -> None:
        assert found.is_contiguous()
        assert (found.double() - expected).norm() / expected.norm() < self._tolerance[found.dtype]


@pytest.fixture(scope="module", params=["elementwise", pytest.param(TRITON, marks=needs_triton)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)


@dtypes_and_rows
@pytest.mark.parametrize("width", [1, 5, 64, 576, 4096])
def test_rms_norm(kernels: Kernels, dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = kernels.random(dtype, rows, width), kernels.random(dtype, width)
    kernels.assert_same(kernels.run.rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (width,), weight.double(), 1e-5))


@dtypes_and_rows
@pytest.mark.parametrize(("heads", "width"), [(1, 8), (3, 80)])
def test_rms_norm_of_heads_in_a_slice_of_the_fused_projection(
    kernels: Kernels, dtype: torch.dtype, rows: int, heads: int, width: int
) -> None:
    x, weight = kernels.random(dtype, rows, heads + 2, width)[:, :heads], kernels.random(dtype, heads, width)
    expected = F.rms_norm(x.double(), (width,), None, 1e-5) * weight.double()
    kernels.assert_same(kernels.run.rms_norm(x, weight, 1e-5), expected)


@dtypes_and_rows
@pytest.mark.parametrize("width", [1, 576, 4096])
def test_add_rms_norm_norms_the_sum_that_it_stores(kernels: Kernels, dtype: torch.dtype, rows: int, width: int) -> None:
    x, other = kernels.random(dtype, rows, width), kernels.random(dtype, rows + 1, width)[1:]
    weight = kernels.random(dtype, width)
    expected = (x.double() + other.double()).to(dtype)
    total, normed = kernels.run.add_rms_norm(x, other, weight, 1e-5)
    torch.testing.assert_close(total, expected)
    kernels.assert_same(normed, F.rms_norm(total.double(), (width,), weight.double(), 1e-5))


@dtypes_and_rows
@pytest.mark.parametrize("inner", [1, 7, 1024, 1536])
def test_silu_mul(kernels: Kernels, dtype: torch.dtype, rows: int, inner: int) -> None:
    gate_up = kernels.random(dtype, rows, 2 * inner)
    gate, up = gate_up.double().chunk(2, dim=-1)
    kernels.assert_same(kernels.run.silu_mul(gate_up), F.silu(gate) * up)


@dtypes
def test_silu_mul_of_extreme_values(kernels: Kernels, dtype: torch.dtype) -> None:
    most = 60000.0 if dtype == torch.float16 else 1e30
    gate_up = torch.tensor([[most, -most, 0.0, torch.nan, 1.0, 1.0, 1.0, 1.0]], dtype=dtype, device=kernels.device)
    expected = F.silu(gate_up[:, :4].float()).to(dtype)
    torch.testing.assert_close(kernels.run.silu_mul(gate_up), expected, equal_nan=True)


@dtypes_and_rows
@pytest.mark.parametrize(("heads", "head_dim", "rotated"), [(1, 2, 2), (5, 64, 64), (3, 80, 20), (40, 128, 128)])
def test_rotate_reads_a_slice_of_the_fused_projection(
    kernels: Kernels, dtype: torch.dtype, rows: int, heads: int, head_dim: int, rotated: int
) -> None:
    fused, table = kernels.random(dtype, rows, heads + 2, head_dim), kernels.random(dtype, 50, rotated)
    positions = torch.arange(rows, device=kernels.device) * 7 % 50
    cos, sin = table.double()[positions][:, None].chunk(2, dim=-1)
    a, b, rest = fused[:, :heads].double().split((rotated // 2, rotated // 2, head_dim - rotated), dim=-1)
    expected = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
    kernels.assert_same(kernels.run.rotate(fused[:, :heads], table, positions), expected)


def test_a_bfloat16_nan_stays_one() -> None:
    x = torch.tensor([[torch.nan, 1.0]], dtype=torch.bfloat16)
    assert elementwise.rms_norm(x, torch.ones(2, dtype=torch.bfloat16), 1e-5).isnan().all()
