"""Short convolutions, the gated delta rule and Mamba 2's scan against Transformers' own functions. Experts.

All on a CPU and, in Triton's interpreter where there is no GPU, on CUDA. Experts are those that tokens visit, and
products of rows that are grouped by expert. Whole layers are beside Transformers in `models.test_stacks`.
"""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from app.gpu.kernels import experts as on_cuda
from app.gpu.kernels.attention.base import make_batch
from app.gpu.kernels.folding import Convolution, Recurrence
from app.gpu.kernels.linear import DenseLinear
from app.gpu.kernels.linear.base import BlockMatrix, Matrix, dense_of
from app.gpu.kernels.linear.encodings import FLOAT8, INT8, quantize
from app.gpu.state.layer_state import aligned
from tests.gpu.kernels.attention.drawing import needs_triton
from tests.gpu.tiny_engine import rounded

TAPS, EPS = 4, 1e-6
LENGTHS = [1, 1, 2, 5]
BLOCK_BYTES = 624
"""A fourth of the larger shape's state; a matrix lies in two of them."""
TRITON = "app.gpu.kernels.folding.triton_folding"


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Layer:
    """A mixer with weights of its own, and what rows keep of it."""

    delta = True

    def __init__(self, module: str, heads: int, key_heads: int, keys: int, values: int) -> None:
        self.run: Any = import_module(module)
        self.device = torch.device("cuda" if module == TRITON and torch.cuda.is_available() else "cpu")
        self.channels = 2 * key_heads * keys + heads * values
        first = aligned((TAPS - 1) * self.channels * 4)
        self.convolution = Convolution(self.channels, TAPS, 0)
        self.recurrence = Recurrence(heads, key_heads, keys, values, first, EPS, self.delta)
        self.weight, self.bias, self.norm = draw(TAPS, self.channels), draw(self.channels), draw(values)
        self.rates, self.time_bias = draw(heads).exp(), draw(heads)
        self.words = (first + heads * keys * values * 4) // 4

    def fold(
        self, x: Tensor, gates: Tensor, states: Tensor, lengths: list[int], kept: Any = None, *, biased: bool = False
    ) -> Tensor:
        """Of rows of so many tokens. `states` `[states, words]` float32 are replaced; `kept` says which a row keeps."""
        batch = make_batch([(3, length) for length in lengths], [[0] * 9] * len(lengths), 16, self.device)
        order = torch.arange(len(states))[:, None]
        kept = order if kept is None and len(states) == 1 else kept
        if kept is not None:
            if self.run.__name__ != TRITON and self.recurrence.fits(BLOCK_BYTES):
                order = torch.randperm(4 * len(states)).view(-1, 4)
            blocks = torch.where(kept[:, :, None] < 0, -1, order[kept])
            batch = replace(batch, state_blocks=blocks.to(self.device))
        memory = torch.empty(order.numel(), states.numel() // order.numel())
        memory[order.flatten()] = states.view(memory.shape)
        memory = memory.to(self.device).view(torch.uint8)
        on = {name: each.to(self.device) for name, each in vars(self).items() if isinstance(each, Tensor)}
        bias = on["bias"] if biased else None
        x, gates = x.to(self.device), gates.to(self.device)
        batch = replace(batch, states=memory)
        mixed = self.run.convolve(x[:, : self.channels], on["weight"], bias, batch, self.convolution)
        factors, z = on["norm"] if self.recurrence.delta else on["time_bias"], x[:, self.channels :]
        found = self.run.recur(mixed, gates, (on["rates"], on["time_bias"], factors), batch, self.recurrence, z)
        states.copy_(memory.view(torch.float32)[order.flatten()].view(states.shape))
        return torch.as_tensor(found.to(z.dtype).cpu())

    def expect(self, x: Tensor, gates: Tensor, state: Tensor, *, biased: bool = False) -> tuple[Tensor, Tensor]:
        """What Transformers' functions make of one row, and leave as its state."""
        shape = self.recurrence
        heads, keys, values = shape.heads, shape.keys, shape.values
        before = state[: (TAPS - 1) * self.channels].view(TAPS - 1, -1)
        inputs, bias = torch.cat((before, x[:, : self.channels])), self.bias if biased else None
        mixed = F.silu(F.conv1d(inputs.T[None], self.weight.T[:, None], bias, groups=self.channels))[0].T
        read, matrices = self.expect_read(mixed, gates, state[shape.first // 4 :].view(1, heads, keys, values), x)
        left = torch.zeros_like(state)
        left[: before.numel()] = inputs[1 - TAPS :].flatten()
        left[shape.first // 4 :] = matrices.flatten()
        return read, left

    def expect_read(self, mixed: Tensor, gates: Tensor, matrices: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """What Transformers' functions make of the convolution's result, and leave."""
        shape, tokens = self.recurrence, len(mixed)
        heads, key_heads, keys, values = shape.heads, shape.key_heads, shape.keys, shape.values
        query, key, value = mixed.split([key_heads * keys, key_heads * keys, heads * values], dim=1)
        read, left = torch_recurrent_gated_delta_rule(
            query.view(1, tokens, key_heads, keys),
            key.view(1, tokens, key_heads, keys),
            value.view(1, tokens, heads, values),
            g=(-self.rates * F.softplus(gates[:, heads:] + self.time_bias))[None],
            beta=gates[:, :heads].sigmoid()[None],
            initial_state=matrices,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        normed = F.rms_norm(read[0], (values,), self.norm, EPS).flatten(1)
        return normed * F.silu(x[:, self.channels :]), left


class Scan(Layer):
    """The mixer of Mamba 2, up to its norm; each head's first gate is its step."""

    delta = False

    def expect_read(self, mixed: Tensor, gates: Tensor, matrices: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        shape, tokens, groups, keys = self.recurrence, len(mixed), self.recurrence.key_heads, self.recurrence.keys
        given = {"D": self.time_bias, "dt_bias": self.time_bias, "dt_softplus": True, "return_final_states": True}
        value, key, query = mixed.split([shape.heads * shape.values, groups * keys, groups * keys], dim=1)
        read, left = mamba2_chunk_scan(
            value.view(1, tokens, shape.heads, shape.values),
            gates[None, :, : shape.heads],
            -self.rates,
            key.view(1, tokens, groups, keys),
            query.view(1, tokens, groups, keys),
            chunk_size=2,
            initial_states=matrices.transpose(2, 3),
            **given,
        )
        return read[0].flatten(1) * F.silu(x[:, self.channels :]), left.transpose(2, 3)


@pytest.mark.parametrize("kind", [Layer, Scan])
@pytest.mark.parametrize("module", ["app.gpu.kernels.folding.cpu", pytest.param(TRITON, marks=needs_triton)])
@pytest.mark.parametrize(("shape", "biased"), [((4, 2, 8, 12), False), ((1, 1, 12, 84), True)], ids=str)
def test_rows_are_folded_as_transformers_folds_them_whatever_their_company_and_cut(
    kind: type[Layer], module: str, shape: tuple[int, int, int, int], biased: bool
) -> None:
    layer, tokens = kind(module, *shape), sum(LENGTHS)
    x, gates = draw(tokens, layer.channels + shape[0] * shape[3]), draw(tokens, 2 * shape[0])
    before = draw(len(LENGTHS), layer.words)
    after = before.clone()
    found = layer.fold(x, gates, after, LENGTHS, biased=biased)
    kept = torch.tensor([[0, -1, -1, -1], [5, -1, -1, -1], [3, 1, -1, -1], [8, 2, 6, 7]])
    states = draw(9, layer.words)
    states[kept[:, 0]] = before
    assert torch.equal(layer.fold(x, gates, states, LENGTHS, kept, biased=biased), found)
    rows = zip(x.split(LENGTHS), gates.split(LENGTHS), before, after, found.split(LENGTHS), kept.tolist(), strict=True)
    for given, opened, state, left, row, places in rows:
        expected, expected_state = layer.expect(given, opened, state, biased=biased)
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
        used = expected_state != 0  # what aligns the state is left as it was
        torch.testing.assert_close(left[used], expected_state[used], rtol=1e-4, atol=1e-4)
        alone, pieces = state[None].clone(), list[Tensor]()
        for part, gate in zip(given.split(2), opened.split(2), strict=True):
            pieces.append(layer.fold(part, gate, alone, [len(part)], biased=biased))
        assert torch.equal(torch.cat(pieces), row)
        assert torch.equal(alone[0], left)
        for later, place in enumerate(reversed([place for place in places if place >= 0])):
            alone, count = state[None].clone(), len(given) - later
            layer.fold(given[:count], opened[:count], alone, [count], biased=biased)
            assert torch.equal(states[place], alone[0]), "what it was before the draft's last tokens"


@needs_triton
@pytest.mark.parametrize("kind", [Layer, Scan])
def test_half_types_are_read_and_written_as_they_are(kind: type[Layer]) -> None:
    """The state's inputs of the convolution are of the type of the computation, its matrices are float32."""
    shapes = 2, 1, 8, 16
    exact, lengths = kind("app.gpu.kernels.folding.cpu", *shapes), [1, 3]
    for module in ("app.gpu.kernels.folding.cpu", TRITON):
        layer = kind(module, *shapes)
        x, gates = draw(4, layer.channels + 32).half(), draw(4, 4).half()
        for name in ("weight", "norm", "time_bias"):
            setattr(layer, name, getattr(layer, name).half())
            setattr(exact, name, getattr(layer, name).float())
        found = layer.fold(x, gates, torch.zeros(2, layer.words), lengths)
        expected = exact.fold(x.float(), gates.float(), torch.zeros(2, exact.words), lengths)
        assert found.dtype is torch.float16
        torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-3)


ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HALF = torch.bfloat16 if ON_GPU else torch.float16
"""The interpreter cannot multiply bfloat16."""
EXPERTS, OUTPUTS, INPUTS, VISITS = 12, 70, 64, 3


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
