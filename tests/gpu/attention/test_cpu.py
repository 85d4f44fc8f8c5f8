"""The CPU attention against the reference, which is itself held against Transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.gpu.attention import cpu_kernels
from app.gpu.attention.base import AttentionSpec
from app.gpu.attention.cpu import PagedCpuAttention
from app.gpu.attention.reference import ReferenceAttention
from app.gpu.batch import Batch, make_batch

CPU = torch.device("cpu")
LAYERS, LAYER = 3, 1


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


@dataclass(frozen=True)
class Inputs:
    """One call's arguments. Slots of the pool that no token of the batch has filled yet hold NaN."""

    query: Tensor
    key: Tensor
    value: Tensor
    pool: Tensor
    batch: Batch
    spec: AttentionSpec

    def run(self, attention: PagedCpuAttention | ReferenceAttention) -> Tensor:
        return attention(self.query, self.key, self.value, self.pool[:, LAYER], self.batch, self.spec)

    def exact(self) -> Inputs:
        """The same in float32, with the rounding of the pool's dtype kept."""
        key, value = self.key.to(self.pool.dtype).float(), self.value.to(self.pool.dtype).float()
        return Inputs(self.query.float(), key, value, self.pool.float(), self.batch, self.spec)


def draw_inputs(shape: Shape, seed: int = 0) -> Inputs:
    """Random sequences in shuffled blocks. Queries, keys and values are views into one tensor, as of a fused layer."""
    generator = torch.Generator().manual_seed(seed)
    widths = [-(-(cached + new) // shape.block_size) for cached, new in shape.rows]
    blocks = random.Random(seed).sample(range(sum(widths) + 2), sum(widths))
    tables = [[blocks.pop() for _ in range(width)] for width in widths]
    pool = torch.full((sum(widths) + 2, LAYERS, 2, shape.kv_heads, shape.block_size, shape.head_dim), float("nan"))
    for table, (cached, _) in zip(tables, shape.rows, strict=True):
        for position in range(cached):
            place = table[position // shape.block_size], position % shape.block_size
            new = torch.randn(2, shape.kv_heads, shape.head_dim, generator=generator)
            pool[place[0], LAYER, :, :, place[1]] = new
    tokens = sum(new for _, new in shape.rows)
    fused = torch.randn(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim, generator=generator)
    query, key, value = fused.to(shape.dtype).split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
    batch = make_batch(shape.rows, tables, shape.block_size, CPU)
    return Inputs(query, key, value, pool.to(shape.pool_dtype), batch, shape.spec)


def assert_agrees(shape: Shape, tolerance: float = 2e-5) -> None:
    """Same output as the reference, and the same pool after it: new tokens in their slots, nothing else touched."""
    inputs = draw_inputs(shape)
    exact = inputs.exact()
    output, expected = inputs.run(PagedCpuAttention()), exact.run(ReferenceAttention())
    assert output.is_contiguous()
    assert output.dtype == shape.dtype
    torch.testing.assert_close(output.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(inputs.pool.float(), exact.pool, rtol=0, atol=0, equal_nan=True)


DECODES = st.tuples(st.integers(0, 600), st.just(1))
CHUNKS = st.tuples(st.integers(0, 60), st.integers(2, 40))


@settings(max_examples=60, deadline=None)
@given(
    decodes=st.lists(DECODES, max_size=4),
    chunks=st.lists(CHUNKS, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    block_size=st.sampled_from([1, 2, 7, 16, 64, 256]),
    window=st.one_of(st.none(), st.integers(1, 700)),
    softcap=st.sampled_from([None, 2.0]),
)
def test_any_batch_agrees_with_the_reference(
    decodes: list[tuple[int, int]],
    chunks: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
) -> None:
    rows = decodes + chunks or [(0, 1)]
    spec = AttentionSpec(scale=0.3, window=window, softcap=softcap)
    assert_agrees(Shape(rows, kv_heads * group, kv_heads, block_size=block_size, spec=spec))


MIXED = [(0, 1), (15, 1), (16, 1), (300, 1), (31, 1), (0, 2), (0, 50), (40, 5), (64, 33), (127, 1 + 8)]


@pytest.mark.parametrize("head_dim", [8, 12, 64, 80, 256])
def test_head_sizes(head_dim: int) -> None:
    assert_agrees(Shape(MIXED, head_dim=head_dim, spec=AttentionSpec(scale=head_dim**-0.5)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    assert_agrees(Shape(MIXED, dtype=dtype, pool_dtype=dtype), tolerance=0.02)


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_pool_under_a_float32_model_is_exact_on_what_it_holds(pool_dtype: torch.dtype) -> None:
    assert_agrees(Shape(MIXED, pool_dtype=pool_dtype))


@pytest.mark.parametrize("scale", [1e-4, 30.0])
def test_flat_and_peaked_scores(scale: float) -> None:
    assert_agrees(Shape(MIXED, spec=AttentionSpec(scale=scale)), tolerance=1e-4)


@pytest.fixture
def _threads_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_threads_restored")
def test_the_number_of_threads_does_not_change_a_bit() -> None:
    outputs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outputs.append(draw_inputs(Shape([(700, 1), (3, 1), (129, 1)])).run(PagedCpuAttention()))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_the_rest_of_the_batch_does_not_change_a_bit_of_a_decode_row() -> None:
    inputs = draw_inputs(Shape([(300, 1), (20, 1), (5, 20)]))
    together = inputs.run(PagedCpuAttention())
    tables = [inputs.batch.block_tables[0].tolist()]
    batch = make_batch([(300, 1)], tables, 16, CPU)
    alone = Inputs(inputs.query[:1], inputs.key[:1], inputs.value[:1], inputs.pool, batch, inputs.spec)
    assert torch.equal(alone.run(PagedCpuAttention()), together[:1])


def test_a_machine_without_a_writable_cache_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CodeLibraryCacheImpl._locator_classes", [])
    cpu_kernels.attend_kernel.cache_clear()
    try:
        assert_agrees(Shape([(40, 1)]))
    finally:
        cpu_kernels.attend_kernel.cache_clear()
