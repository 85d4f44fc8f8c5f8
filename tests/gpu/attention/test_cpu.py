"""The CPU attention: what the reference and the other backends have no counterpart of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings

from app.gpu.attention import cpu_kernels
from app.gpu.attention.base import AttentionSpec
from app.gpu.attention.batch import make_batch
from app.gpu.attention.cpu import PagedCpuAttention
from tests.gpu.attention.drawing import DEVICES, MIXED, Inputs, Shape, any_shape, assert_agrees, draw_inputs


@settings(max_examples=60)
@given(any_shape())
def test_any_batch_agrees_with_the_reference(shape: Shape) -> None:
    assert_agrees("cpu", shape)


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_pool_under_a_float32_model_is_exact_on_what_it_holds(pool_dtype: torch.dtype) -> None:
    assert_agrees("cpu", Shape(MIXED, pool_dtype=pool_dtype))


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
    batch = make_batch([(300, 1)], tables, 16, DEVICES["cpu"])
    alone = Inputs(inputs.query[:1], inputs.key[:1], inputs.value[:1], inputs.pool, batch, inputs.spec)
    assert torch.equal(alone.run(PagedCpuAttention()), together[:1])


def test_a_machine_without_a_writable_cache_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CodeLibraryCacheImpl._locator_classes", [])
    cpu_kernels.attend_kernel.cache_clear()
    try:
        assert_agrees("cpu", Shape([(40, 1)]))
    finally:
        cpu_kernels.attend_kernel.cache_clear()


@pytest.mark.parametrize("window", [None, 37, 300])
def test_where_a_prompt_is_cut_does_not_change_a_bit(window: int | None) -> None:
    whole = draw_inputs(Shape([(0, 1000)], spec=AttentionSpec(scale=0.3, window=window)))
    expected = whole.run(PagedCpuAttention())
    table, pool = whole.batch.block_tables[0].tolist(), whole.pool
    for first, end in ((0, 60), (60, 433), (433, 520), (520, 530), (530, 1000)):
        batch = make_batch([(first, end - first)], [table], 16, DEVICES["cpu"])
        assert torch.equal(whole.narrowed(slice(first, end), pool, batch).run(PagedCpuAttention()), expected[first:end])
