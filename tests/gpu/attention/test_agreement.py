"""Every fast attention against the reference, which is itself held against Transformers."""

from __future__ import annotations

import pytest
import torch

from app.gpu.attention import attention_named
from app.gpu.attention.base import AttentionSpec
from app.gpu.attention.batch import make_batch
from tests.gpu.attention.drawing import (
    CUDA,
    DEVICES,
    MIXED,
    NO_BFLOAT16,
    Inputs,
    Shape,
    assert_agrees,
    draw_inputs,
    needs_triton,
)

pytestmark = pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=needs_triton)])


@pytest.mark.parametrize(
    "head_dim", [8, 12, 64, *(pytest.param(size, marks=pytest.mark.long) for size in (80, 128, 256))]
)
def test_head_sizes(backend: str, head_dim: int) -> None:
    assert_agrees(backend, Shape(MIXED, head_dim=head_dim, spec=AttentionSpec(scale=head_dim**-0.5)))


@pytest.mark.parametrize("heads", [1, 7, 20])
def test_group_sizes(backend: str, heads: int) -> None:
    assert_agrees(backend, Shape([(40, 1), (3, 1), (9, 12)], heads=heads, kv_heads=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (33, 2.0)])
def test_half_precision(backend: str, dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    if backend == "cuda" and dtype == torch.bfloat16 and not CUDA:
        pytest.skip(NO_BFLOAT16)
    spec = AttentionSpec(scale=0.3, window=window, softcap=softcap)
    assert_agrees(backend, Shape(MIXED, dtype=dtype, pool_dtype=dtype, spec=spec), tolerance=0.02)


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_pool_under_a_float32_model_is_exact_on_what_it_holds(
    backend: str, pool_dtype: torch.dtype
) -> None:
    if backend == "cuda" and pool_dtype == torch.bfloat16 and not CUDA:
        pytest.skip("Triton's interpreter cuts bfloat16 off instead of rounding to it")
    for window, softcap in ((None, None), (33, 2.0)):
        spec = AttentionSpec(scale=0.3, window=window, softcap=softcap)
        assert_agrees(backend, Shape(MIXED, pool_dtype=pool_dtype, spec=spec))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [12, 64])
def test_a_float8_pool_is_exact_on_what_it_holds(backend: str, head_dim: int, dtype: torch.dtype) -> None:
    if backend == "cuda" and dtype == torch.bfloat16 and not CUDA:
        pytest.skip(NO_BFLOAT16)
    tolerance = 2e-5 if dtype == torch.float32 else 0.02
    for window, softcap in ((None, None), (33, 2.0)):
        spec = AttentionSpec(scale=0.3, window=window, softcap=softcap)
        shape = Shape(MIXED, head_dim=head_dim, dtype=dtype, pool_dtype=torch.float8_e4m3fn, spec=spec)
        assert_agrees(backend, shape, tolerance)


@pytest.mark.parametrize("scale", [1e-4, 30.0])
def test_flat_and_peaked_scores(backend: str, scale: float) -> None:
    assert_agrees(backend, Shape(MIXED, spec=AttentionSpec(scale=scale)), tolerance=1e-4)


def test_sessions_that_share_blocks_read_the_same_keys(backend: str) -> None:
    device = DEVICES[backend]
    drawn = draw_inputs(Shape([(40, 1)]), device=device)
    table = drawn.batch.block_tables[0].tolist()
    spare = next(block for block in range(drawn.pool.shape[0]) if block not in table)
    fork = [*table[:2], spare]
    drawn.pool[spare] = drawn.pool[table[2]]
    batch = make_batch([(40, 1), (40, 1)], [table, fork], 16, device)
    query, key, value = (x.repeat(2, 1, 1) for x in (drawn.query, drawn.key, drawn.value))
    output = Inputs(query, key, value, drawn.pool, batch, drawn.spec).run(attention_named(backend))
    assert torch.equal(output[0], output[1])
    torch.testing.assert_close(output[:1], drawn.run(attention_named("reference")), rtol=2e-5, atol=2e-5)
