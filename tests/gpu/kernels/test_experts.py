"""Experts: which ones tokens visit, and products of rows that are grouped by expert, on a CPU and, in Triton's
interpreter where there is no GPU, on CUDA. Whole layers of experts are beside Transformers in `models.test_stacks`.
"""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from app.gpu.kernels import experts as on_cuda
from app.gpu.kernels.linear import DenseLinear
from app.gpu.kernels.linear.base import BlockMatrix, Matrix, dense_of
from app.gpu.kernels.linear.encodings import FLOAT8, INT8, quantize
from tests.gpu.oracle import rounded

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HALF = torch.bfloat16 if ON_GPU else torch.float16
"""The interpreter cannot multiply bfloat16."""
EXPERTS, OUTPUTS, INPUTS, VISITS = 12, 70, 64, 3
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


ROUTINGS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, renormalized": {"renormalized": True},
    "sigmoid, corrected": {"sigmoid": True, "correction": draw(EXPERTS), "renormalized": True, "scale": 2.5},
    "groups": {"sigmoid": True, "correction": draw(EXPERTS), "groups": 4, "top_groups": 2},
}


@pytest.mark.parametrize("how", ROUTINGS)
def test_a_cpu_takes_tokens_where_operators_take_them(how: str) -> None:
    """The router has more outputs than there are experts."""
    from app.gpu.kernels.cpu import experts as on_cpu  # Numba, which the tests on a GPU do without

    logits, x, shared = draw(9, 20), draw(9, 40), draw(9, 40, seed=1)
    ids, weights = on_cpu.route(logits, VISITS, experts=EXPERTS, **ROUTINGS[how])
    expected_ids, expected = on_cuda.route(logits, VISITS, experts=EXPERTS, **ROUTINGS[how])
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected)
    for ours, theirs in zip(on_cpu.group(ids, EXPERTS), on_cuda.group(expected_ids, EXPERTS), strict=True):
        assert torch.equal(ours.long(), theirs.long())
    places, _ = on_cpu.group(ids, EXPERTS)
    visits = on_cpu.spread(x, places)
    assert torch.equal(visits, on_cuda.spread(x, places))
    for more in ((), (shared,), (shared, logits[:, EXPERTS:])):
        found, theirs = (on.combine(visits, places, weights, *more) for on in (on_cpu, on_cuda))
        torch.testing.assert_close(found, theirs)


def product(x: Tensor, matrix: Matrix, bias: Tensor, starts: Tensor) -> Tensor:
    """Each expert's rows with its part of `matrix`, in float64."""
    weight, rows = dense_of(matrix).double().view(EXPERTS, OUTPUTS, INPUTS), x.double().flatten(0, 1)
    parts = [rows[starts[i] : starts[i + 1]] @ weight[i].T + bias[i].double() for i in range(EXPERTS)]
    return torch.cat(parts).view(*x.shape[:2], OUTPUTS)


def visited(tokens: int) -> Tensor:
    """Where the rows of experts begin that so many tokens visit; some are visited by none."""
    ids, _ = on_cuda.route(draw(tokens, EXPERTS) + torch.arange(EXPERTS), VISITS, experts=EXPERTS)
    return on_cuda.group(ids, EXPERTS)[1]


@pytest.mark.parametrize("kind", [None, "bfloat16", INT8])
def test_a_row_has_its_bits_whoever_visits_its_expert(kind: str | None) -> None:
    from app.gpu.kernels.linear.panels import PanelLinear

    dense = draw(EXPERTS * OUTPUTS, INPUTS)
    weight = BlockMatrix(INT8, quantize(INT8, dense), (EXPERTS * OUTPUTS, INPUTS)) if kind == INT8 else dense
    bias = draw(EXPERTS, OUTPUTS)
    linear = PanelLinear(weight, bias, EXPERTS, in_bfloat16=kind == "bfloat16")
    starts, x = visited(20), draw(20, VISITS, INPUTS)
    found = linear(x, starts)
    if kind != "bfloat16":
        torch.testing.assert_close(found.double(), product(x, weight, bias, starts), rtol=1e-4, atol=1e-4)
    rows = x.flatten(0, 1)
    for expert in range(EXPERTS):
        alone = torch.zeros(EXPERTS + 1, dtype=torch.int32)
        alone[expert + 1 :] = 1
        for row in range(int(starts[expert]), int(starts[expert + 1])):
            assert torch.equal(linear(rows[row].view(1, 1, -1), alone)[0, 0], found.flatten(0, 1)[row])


@needs_triton
@pytest.mark.parametrize("kind", [None, INT8, pytest.param(FLOAT8, marks=pytest.mark.long)])
def test_products_on_cuda(kind: str | None) -> None:
    """With more rows of an expert than a tile has, and with some."""
    dense = draw(EXPERTS * OUTPUTS, INPUTS).to(DEVICE, HALF)
    weight = dense if kind is None else BlockMatrix(kind, quantize(kind, dense), (EXPERTS * OUTPUTS, INPUTS))
    bias = draw(EXPERTS, OUTPUTS).to(DEVICE, HALF)
    linear = DenseLinear(weight, bias, EXPERTS, dtype=HALF)
    for tokens in (1, 90):
        starts, x = visited(tokens).to(DEVICE), draw(tokens, VISITS, INPUTS).to(DEVICE, HALF)
        given = rounded(x.double(), torch.float8_e4m3fn) if kind == FLOAT8 else x
        found = linear(x, starts)
        torch.testing.assert_close(found.double(), product(given, weight, bias, starts), rtol=2e-2, atol=0.1)


@pytest.mark.cuda
@pytest.mark.skipif(not ON_GPU, reason="there is no GPU")
def test_a_graph_takes_other_tokens_to_other_experts() -> None:
    """What a graph is captured with decides nothing."""
    linear = DenseLinear(draw(EXPERTS * INPUTS, INPUTS).to(DEVICE, HALF), None, EXPERTS, dtype=HALF)
    logits, x = draw(9, EXPERTS).to(DEVICE), draw(9, INPUTS).to(DEVICE, HALF)

    def run() -> Tensor:
        ids, weights = on_cuda.route(logits, VISITS, experts=EXPERTS)
        places, starts = on_cuda.group(ids, EXPERTS)
        return on_cuda.combine(linear(on_cuda.spread(x, places), starts), places, weights)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    logits.copy_(draw(9, EXPERTS, seed=1))
    graph.replay()
    assert torch.equal(found, run())
