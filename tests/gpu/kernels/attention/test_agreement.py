"""The reference attention against Transformers' over contiguous keys and values, and every fast one against it."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from app.gpu.kernels.attention import attention_pattern, pattern_by_operators
from app.gpu.kernels.attention.base import AttentionSpec, from_rows, make_batch
from app.gpu.kernels.attention.cpu import attend_on_cpu, store
from tests.gpu.kernels.attention.drawing import (
    CUDA,
    DEVICES,
    LAYER,
    MIXED,
    NO_BFLOAT16,
    Inputs,
    Shape,
    any_shape,
    assert_agrees,
    chunks,
    draw_inputs,
    needs_triton,
)
from tests.gpu.kernels.attention.reference import ReferenceAttention
from tests.gpu.tiny_engine import rounded

ROWS = [(8, 1), (16, 1), (0, 1), (9, 5), (0, 8), (19, 2)]
BLOCK_SIZE = 4


class _Heads(nn.Module):
    """What Transformers' eager attention reads off the module that calls it."""

    num_key_value_groups = 3


def expected(inputs: Inputs) -> Tensor:
    """Transformers' eager attention, one sequence at a time, over a mask written out from the definition."""
    module, spec, parts = _Heads(), inputs.spec, []
    for row, table in zip(inputs.batch.rows, inputs.batch.block_tables.tolist(), strict=True):
        tokens, cached = slice(row.start, row.start + row.length), row.context - row.length
        blocks = inputs.pool[table, LAYER].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :cached]
        keys, values = torch.cat((blocks, torch.stack((inputs.key[tokens], inputs.value[tokens]))), dim=1)
        mask = torch.full((row.length, row.context), float("-inf"))
        for place in range(row.length):
            newest = cached + place
            oldest = 0 if spec.window is None else max(0, newest - spec.window + 1)
            mask[place, oldest : newest + 1] = 0.0
        query, keys, values = (each.transpose(0, 1)[None] for each in (inputs.query[tokens], keys, values))
        output, _ = eager_attention_forward(
            module, query, keys, values, mask.to(keys.dtype), scaling=spec.scale, softcap=spec.softcap
        )
        parts.append(output[0])
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("dtype", "window", "softcap"),
    [
        (torch.float32, None, None),
        (torch.float32, 1, 2.0),
        (torch.float32, 5, None),
        (torch.float32, 100, 2.0),
        (torch.bfloat16, None, 2.0),
        (torch.float16, 5, None),
    ],
)
def test_attention_agrees_with_transformers(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    spec = AttentionSpec(scale=0.3, window=window, softcap=softcap)
    inputs = draw_inputs(Shape(ROWS, block_size=BLOCK_SIZE, dtype=dtype, pool_dtype=dtype, spec=spec))
    wanted, found = expected(inputs), inputs.run(ReferenceAttention())
    assert found.is_contiguous()
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.long
def test_a_cpu_needs_no_triton() -> None:
    program = "import sys; sys.modules['triton'] = None\nimport app.gpu.startup.loader, torch\n"
    program += "app.gpu.kernels.attention.attention_for(torch.device('cpu'))"
    subprocess.run([sys.executable, "-c", program], check=True)


FLOAT32, BFLOAT16, FLOAT16, FLOAT8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
LIMITED = AttentionSpec(scale=0.3, window=33, softcap=2.0)
SHAPES: dict[str, Shape] = {
    "heads of 12": Shape(MIXED, head_dim=12),
    "heads of 64": Shape(MIXED, head_dim=64, spec=AttentionSpec(0.125)),
    "heads of 256": Shape(MIXED, head_dim=256, spec=AttentionSpec(0.0625)),
    "a group of 20": Shape([(40, 1), (3, 1), (9, 12)], heads=20, kv_heads=1),
    "flat scores": Shape(MIXED, spec=AttentionSpec(1e-4)),
    "sinks": Shape(MIXED, has_sinks=True),
    "peaked scores": Shape(MIXED, spec=AttentionSpec(30.0)),
    "float16": Shape(MIXED, dtype=FLOAT16, pool_dtype=FLOAT16),
    "bfloat16, limited": Shape(MIXED, dtype=BFLOAT16, pool_dtype=BFLOAT16, spec=LIMITED),
    "float32 over bfloat16": Shape(MIXED, pool_dtype=BFLOAT16),
    "float32 over float16, limited": Shape(MIXED, pool_dtype=FLOAT16, spec=LIMITED),
    "float32 over float8, limited": Shape(MIXED, head_dim=12, pool_dtype=FLOAT8, spec=LIMITED),
    "bfloat16 over float8": Shape(MIXED, head_dim=64, dtype=BFLOAT16, pool_dtype=FLOAT8),
    "float16 over float8, limited": Shape(MIXED, head_dim=64, dtype=FLOAT16, pool_dtype=FLOAT8, spec=LIMITED),
}
LARGE = {"heads of 256": pytest.mark.long}
BRIEF = [(0, 1), (15, 1), (16, 1), (150, 1), (0, 2), (0, 20), (40, 5), (127, 1 + 8)]
"""For Triton's interpreter."""
INTERPRETED = ("float16", "sinks", "float32 over float8, limited")
"""What `make test` looks at in Triton's interpreter."""


@pytest.mark.parametrize(
    ("backend", "shape"),
    [
        *(pytest.param("cpu", shape, id=f"cpu, {name}", marks=LARGE.get(name, ())) for name, shape in SHAPES.items()),
        *(
            pytest.param(
                "cuda",
                shape,
                id=f"cuda, {name}",
                marks=needs_triton if name in INTERPRETED else [needs_triton, pytest.mark.long],
            )
            for name, shape in SHAPES.items()
        ),
    ],
)
def test_it_gives_what_the_reference_gives(backend: str, shape: Shape) -> None:
    """With a pool of a smaller type: exactly what follows from what the pool holds."""
    if backend == "cuda" and not CUDA:
        if BFLOAT16 in (shape.dtype, shape.pool_dtype):
            pytest.skip(NO_BFLOAT16)
        shape = replace(shape, rows=BRIEF)
    assert_agrees(backend, shape, tolerance=1e-4 if shape.dtype is FLOAT32 else 0.02)


@pytest.mark.parametrize("pattern", [attention_pattern, pattern_by_operators])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_pattern_is_the_shares_that_values_have_in_attention(pattern: Any, shape: Shape) -> None:
    inputs = draw_inputs(shape)
    inputs.run(ReferenceAttention())  # stores the batch's own keys and values
    exact, group = inputs.exact(), shape.heads // shape.kv_heads
    wanted, kv = exact.run(ReferenceAttention()), exact.pool[:, LAYER]
    for row, table in zip(inputs.batch.rows, inputs.batch.block_tables, strict=True):
        chosen, heads = range(row.context - row.length, row.context, 2), [*range(0, shape.heads, 2)]
        query = inputs.query[row.start : row.start + row.length : 2]
        found = pattern(query, inputs.pool[:, LAYER], table, chosen, inputs.spec, heads)
        values = kv[table[: -(-row.context // shape.block_size)].long(), 1].transpose(0, 1).flatten(1, 2).nan_to_num()
        mixed = torch.einsum("qhk,hkd->qhd", found, values[[head // group for head in heads], : found.shape[2]])
        torch.testing.assert_close(mixed, wanted[row.start : row.start + row.length : 2, heads], rtol=1e-4, atol=1e-4)


def test_large_patterns_have_their_zeros_whatever_was_in_their_memory() -> None:
    kv, table = torch.randn(32, 2, 2, 16, 8), torch.randperm(32, dtype=torch.int32)
    for first, window in ((256, None), (256, None), (200, 70), (256, 70), (256, None)):
        positions, spec = range(first, first + 256), AttentionSpec(scale=0.3, window=window)
        query, given = torch.randn(256, 4, 8), (kv, table, positions, spec, range(4))
        torch.testing.assert_close(attention_pattern(query, *given), pattern_by_operators(query, *given))


@given(any_shape())
def test_any_batch_on_a_cpu(shape: Shape) -> None:
    assert_agrees("cpu", shape)


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
        outputs.append(draw_inputs(Shape([(700, 1), (3, 1), (129, 1)])).run(attend_on_cpu))
    assert torch.equal(*outputs)


POOLS = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("pool_dtype", POOLS, ids=str)
def test_a_prompt_at_once_in_parts_and_token_by_token_has_the_same_bits_if_that_is_asked_for(
    pool_dtype: torch.dtype,
) -> None:
    """A query sees the keys and values of its own step as every later one does: rounded."""
    attention, shape = partial(attend_on_cpu, batch_invariant=True), Shape([(0, 70)], pool_dtype=pool_dtype)
    expected = draw_inputs(shape).run(attention)
    for cuts in ([(0, 20), (20, 3), (23, 47)], [(position, 1) for position in range(70)]):
        parts = [part.run(attention) for part in chunks(draw_inputs(shape), cuts)]
        assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize(
    ("window", "head_dim", "pool_dtype", "in_bfloat16"),
    [(None, 8, POOLS[0], False), (300, 12, POOLS[2], True), (37, 12, POOLS[3], False), (None, 64, POOLS[3], True)],
)
def test_where_a_prompt_is_cut_does_not_change_a_bit(
    window: int | None, head_dim: int, pool_dtype: torch.dtype, in_bfloat16: bool
) -> None:
    """By kernels that other tests here compile: each takes seconds."""
    attention, spec = partial(attend_on_cpu, in_bfloat16=in_bfloat16), AttentionSpec(scale=0.3, window=window)
    whole = draw_inputs(Shape([(0, 1000)], head_dim=head_dim, pool_dtype=pool_dtype, spec=spec))
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
    drawn = draw_inputs(Shape([(0, 70)]))
    alike = replace(drawn, key=rounded(drawn.key, torch.bfloat16), value=rounded(drawn.value, torch.bfloat16))
    in_bfloat16 = partial(attend_on_cpu, in_bfloat16=True)
    assert torch.equal(drawn.run(in_bfloat16), alike.run(in_bfloat16))
    assert not torch.equal(drawn.run(attend_on_cpu), alike.run(attend_on_cpu))


def test_single_queries_stay_in_float32_beside_prompts_in_bfloat16() -> None:
    drawn = draw_inputs(Shape([(300, 1), (20, 1), (0, 50)]))
    assert torch.equal(drawn.run(partial(attend_on_cpu, in_bfloat16=True))[:2], drawn.run(attend_on_cpu)[:2])
