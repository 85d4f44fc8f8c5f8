"""Random batches over a paged pool, and what a backend must do with them: the same as the reference."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from app.gpu.kernels.attention import attention_for
from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch, from_rows, make_batch, to_rows
from tests.gpu.kernels.attention.reference import ReferenceAttention

CUDA = torch.cuda.is_available()
_CUDA_OR_CPU = torch.device("cuda" if CUDA else "cpu")
_CPU = torch.device("cpu")
DEVICES = {"cpu": _CPU, "cpu-bfloat16": _CPU, "cuda": _CUDA_OR_CPU, "cuda-batch-invariant": _CUDA_OR_CPU}
"""Where each backend's tensors are."""
LAYERS, LAYER = 3, 1

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_cuda = pytest.mark.skipif(not CUDA, reason="no CUDA device: kernels run in Triton's interpreter only")
NO_BFLOAT16 = "Triton's interpreter multiplies bfloat16 as the integers of its bits"


@dataclass(frozen=True)
class Shape:
    """What the tests vary. `rows` are `(tokens in the cache, new tokens)`, decode rows first."""

    rows: list[tuple[int, int]]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32
    spec: AttentionSpec = field(default_factory=lambda: AttentionSpec(scale=0.3))
    has_sinks: bool = False


@dataclass(frozen=True)
class Inputs:
    """One call's arguments. Slots of the pool that no token of the batch has filled yet hold NaN."""

    query: Tensor
    key: Tensor
    value: Tensor
    pool: Tensor
    batch: Batch
    spec: AttentionSpec

    def run(self, attention: Attention) -> Tensor:
        return attention(self.query, self.key, self.value, self.pool[:, LAYER], self.batch, self.spec)

    def narrowed(self, tokens: slice, pool: Tensor, batch: Batch) -> Inputs:
        """Some of the tokens, described by `batch`, over `pool`."""
        return Inputs(self.query[tokens], self.key[tokens], self.value[tokens], pool, batch, self.spec)

    def exact(self) -> Inputs:
        """The same in float32, with the rounding of the pool's dtype kept."""
        key, value = (from_rows(to_rows(each, self.pool.dtype), torch.float32) for each in (self.key, self.value))
        pool = from_rows(self.pool, torch.float32)
        return Inputs(self.query.float(), key, value, pool, self.batch, self.spec)


def draw_inputs(shape: Shape, seed: int = 0, device: torch.device = DEVICES["cpu"]) -> Inputs:
    """Random sequences in shuffled blocks. Queries, keys and values are views into one tensor, as of a fused layer.

    Blocks behind a window have been given up: tables name the first that is held, and the others hold NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    widths = [-(-(cached + new) // shape.block_size) for cached, new in shape.rows]
    blocks = random.Random(seed).sample(range(sum(widths) + 2), sum(widths))
    tables = [[blocks.pop() for _ in range(width)] for width in widths]
    pool = torch.full((sum(widths) + 2, LAYERS, 2, shape.kv_heads, shape.block_size, shape.head_dim), float("nan"))
    for table, (cached, _) in zip(tables, shape.rows, strict=True):
        kept = len(table) if shape.spec.window is None else -(-shape.spec.window // shape.block_size)
        behind = max(0, cached // shape.block_size - kept)
        table[:behind] = table[behind : behind + 1] * behind
        for position in range(behind * shape.block_size, cached):
            place = table[position // shape.block_size], position % shape.block_size
            new = torch.randn(2, shape.kv_heads, shape.head_dim, generator=generator)
            pool[place[0], LAYER, :, :, place[1]] = new
    tokens = sum(new for _, new in shape.rows)
    fused = torch.randn(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim, generator=generator)
    fused = fused.to(device, shape.dtype)
    query, key, value = fused.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
    batch = make_batch(shape.rows, tables, shape.block_size, device)
    sinks = torch.linspace(-2, 4, shape.heads, device=device) if shape.has_sinks else None
    pool = to_rows(pool.to(device), shape.pool_dtype)
    return Inputs(query, key, value, pool, batch, replace(shape.spec, sinks=sinks))


def assert_agrees(backend: str, shape: Shape, tolerance: float = 2e-5) -> None:
    """Same output as the reference, and the same pool after it: new tokens in their slots, nothing else touched."""
    inputs = draw_inputs(shape, device=DEVICES[backend])
    exact = inputs.exact()
    device, _, wish = backend.partition("-")
    attention = attention_for(
        torch.device(device), batch_invariant=wish == "batch-invariant", in_bfloat16=wish == "bfloat16"
    )
    output, expected = inputs.run(attention), exact.run(ReferenceAttention())
    assert output.is_contiguous()
    assert output.dtype == shape.dtype
    torch.testing.assert_close(output.float(), expected, rtol=tolerance, atol=tolerance)
    held = from_rows(inputs.pool, torch.float32)
    torch.testing.assert_close(held, exact.pool, rtol=0, atol=0, equal_nan=True)


MIXED = [(0, 1), (15, 1), (16, 1), (300, 1), (31, 1), (0, 2), (0, 50), (40, 5), (64, 33), (127, 1 + 8)]
"""Decode rows and chunks about the edges of blocks and tiles."""
DECODES = st.tuples(st.integers(0, 600), st.just(1))
CHUNKS = st.tuples(st.integers(0, 60), st.integers(2, 40))


@st.composite
def any_shape(draw: st.DrawFn) -> Shape:
    """Any mixture of decode rows and chunks, group and block sizes, window, softcap and sinks."""
    rows = draw(st.lists(DECODES, max_size=4)) + draw(st.lists(CHUNKS, max_size=3)) or [(0, 1)]
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    window, softcap = draw(st.one_of(st.none(), st.integers(1, 700))), draw(st.sampled_from([None, 2.0]))
    spec = AttentionSpec(scale=0.3, window=window, softcap=softcap)
    block_size = draw(st.sampled_from([1, 2, 7, 16, 64, 256]))
    has_sinks = draw(st.booleans())
    return Shape(rows, kv_heads * group, kv_heads, block_size=block_size, spec=spec, has_sinks=has_sinks)


def chunks(inputs: Inputs, cuts: list[tuple[int, int]]) -> list[Inputs]:
    """The one row of `inputs` cut into chunks of `(first position, tokens)`, to be run in turn."""
    (row,) = inputs.batch.rows
    parts = []
    for first, count in cuts:
        tokens = slice(first - row.context + row.length, first - row.context + row.length + count)
        table = inputs.batch.block_tables.tolist()
        batch = make_batch([(first, count)], table, inputs.pool.shape[4], inputs.pool.device)
        parts.append(inputs.narrowed(tokens, inputs.pool, batch))
    return parts
