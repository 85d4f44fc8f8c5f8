"""The CPU attention: what the reference and the other backends have no counterpart of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from app.gpu.attention.base import AttentionSpec
from app.gpu.attention.batch import make_batch
from app.gpu.attention.cpu import kernels
from app.gpu.attention.cpu.paged import PagedCpuAttention, batch_invariant_attention, bfloat16_attention
from app.gpu.attention.cpu.store import store
from app.gpu.attention.pool_rows import from_rows
from tests.gpu.attention.drawing import DEVICES, MIXED, Inputs, Shape, assert_agrees, chunks, draw_inputs
from tests.gpu.oracle import rounded


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_keys_and_values_are_rounded_as_pytorch_rounds_them(pool_dtype: torch.dtype) -> None:
    """To nearest even; with ties, numbers too large and too small for the type, infinities and NaN."""
    halfway = [1 + n * 2.0**-8 for n in range(8)] + [1 + n * 2.0**-11 for n in range(8)]
    odd = [0.0, -0.0, 65519.0, 65520.0, 1e38, 3.4e38, 2.0**-24, 2.0**-25, 3e-8, 1e-40, float("inf"), float("nan")]
    numbers = torch.tensor([*halfway, *odd, *torch.randn(36, generator=torch.Generator().manual_seed(0)).tolist()])
    key = torch.stack((numbers, -numbers)).view(2, 1, 64)
    value, pool = key.flip(2), torch.full((3, 2, 1, 2, 64), 7.0, dtype=pool_dtype)
    store(key, value, pool, torch.tensor([2, 0]), torch.tensor([1, 0]))
    expected = torch.full_like(pool, 7.0)
    for token, (block, offset) in enumerate(((2, 1), (0, 0))):
        expected[block, 0, :, offset], expected[block, 1, :, offset] = key[token], value[token]
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float8_is_rounded_as_pytorch_rounds_it(dtype: torch.dtype) -> None:
    """To nearest even, with the least power of two that brings a head within 448; what is not finite shows."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (grid[1:] + grid[:-1]) / 2
    heads = [grid, -halves, halves.nextafter(grid[1:]), grid * 3e-5, torch.zeros(126), torch.tensor([1.0, torch.inf])]
    key = torch.stack([F.pad(each, (0, 128 - len(each))) for each in heads])[:, None].to(dtype)
    value, pool = key.flip(0), torch.zeros(6, 2, 1, 4, 132, dtype=torch.float8_e4m3fn)
    store(key, value, pool, torch.arange(6), torch.arange(6) % 4)
    for token in range(6):
        for which, states in enumerate((key, value)):
            found = from_rows(pool[token, which, 0, token % 4], torch.float32)
            torch.testing.assert_close(
                found, rounded(states[token, 0].float(), pool.dtype), rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.usefixtures("one_thread")  # which puts back how many there were
def test_the_number_of_threads_does_not_change_a_bit() -> None:
    outputs = []
    for threads in (1, 5):
        torch.set_num_threads(threads)
        outputs.append(draw_inputs(Shape([(700, 1), (3, 1), (129, 1)])).run(PagedCpuAttention()))
    assert torch.equal(*outputs)


def test_the_rest_of_the_batch_does_not_change_a_bit_of_a_decode_row() -> None:
    inputs = draw_inputs(Shape([(300, 1), (20, 1), (5, 20)]))
    together = inputs.run(PagedCpuAttention())
    tables = [inputs.batch.block_tables[0].tolist()]
    batch = make_batch([(300, 1)], tables, 16, DEVICES["cpu"])
    alone = Inputs(inputs.query[:1], inputs.key[:1], inputs.value[:1], inputs.pool, batch, inputs.spec)
    assert torch.equal(alone.run(PagedCpuAttention()), together[:1])


@pytest.mark.long
def test_a_machine_without_a_writable_cache_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CodeLibraryCacheImpl._locator_classes", [])
    kernels.attend_kernel.cache_clear()
    try:
        assert_agrees("cpu", Shape([(40, 1)]))
    finally:
        kernels.attend_kernel.cache_clear()


POOLS = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("pool_dtype", POOLS, ids=str)
def test_a_prompt_at_once_in_parts_and_token_by_token_has_the_same_bits_if_that_is_asked_for(
    pool_dtype: torch.dtype,
) -> None:
    """A query sees the keys and values of its own step as every later one does: rounded."""
    attention, shape = batch_invariant_attention(), Shape([(0, 70)], pool_dtype=pool_dtype)
    expected = draw_inputs(shape).run(attention)
    for cuts in ([(0, 20), (20, 3), (23, 47)], [(position, 1) for position in range(70)]):
        parts = [part.run(attention) for part in chunks(draw_inputs(shape), cuts)]
        assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("attention", [PagedCpuAttention(), bfloat16_attention()], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("window", "pool_dtype"), [(None, POOLS[0]), (300, POOLS[1]), (37, POOLS[3])])
def test_where_a_prompt_is_cut_does_not_change_a_bit(
    window: int | None, pool_dtype: torch.dtype, attention: PagedCpuAttention
) -> None:
    whole = draw_inputs(Shape([(0, 1000)], pool_dtype=pool_dtype, spec=AttentionSpec(scale=0.3, window=window)))
    expected = whole.run(attention)
    table, pool = whole.batch.block_tables[0].tolist(), whole.pool
    for first, end in ((0, 60), (60, 433), (433, 520), (520, 530), (530, 1000)):
        batch = make_batch([(first, end - first)], [table], 16, DEVICES["cpu"])
        assert torch.equal(whole.narrowed(slice(first, end), pool, batch).run(attention), expected[first:end])


@pytest.mark.parametrize(("head_dim", "pool_dtype"), [(5, POOLS[0]), (12, POOLS[2]), (64, POOLS[3])])
def test_prompts_in_bfloat16_agree_with_the_reference_as_far_as_that_rounds(
    head_dim: int, pool_dtype: torch.dtype
) -> None:
    for window, softcap in ((None, None), (33, 2.0)):
        spec = AttentionSpec(scale=0.3, window=window, softcap=softcap)
        shape = Shape([*MIXED, (500, 200)], head_dim=head_dim, pool_dtype=pool_dtype, spec=spec)
        assert_agrees("cpu-bfloat16", shape, tolerance=0.02)


def test_keys_and_values_that_round_alike_give_prompts_in_bfloat16_the_same_bits() -> None:
    drawn = draw_inputs(Shape([(0, 70)], head_dim=64))
    alike = replace(drawn, key=rounded(drawn.key, torch.bfloat16), value=rounded(drawn.value, torch.bfloat16))
    assert torch.equal(drawn.run(bfloat16_attention()), alike.run(bfloat16_attention()))
    assert not torch.equal(drawn.run(PagedCpuAttention()), alike.run(PagedCpuAttention()))


def test_single_queries_stay_in_float32_beside_prompts_in_bfloat16() -> None:
    drawn = draw_inputs(Shape([(300, 1), (20, 1), (0, 50)]))
    assert torch.equal(drawn.run(bfloat16_attention())[:2], drawn.run(PagedCpuAttention())[:2])
