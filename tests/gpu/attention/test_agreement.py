"""The reference attention against Transformers' over contiguous keys and values, and every fast one against it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from app.domain.errors import FieldOutOfRange
from app.gpu.attention import attention_for, attention_named
from app.gpu.attention.base import AttentionSpec
from app.gpu.attention.batch import make_batch
from app.gpu.attention.reference import ReferenceAttention
from tests.gpu.attention.drawing import (
    CUDA,
    DEVICES,
    LAYER,
    MIXED,
    NO_BFLOAT16,
    Inputs,
    Shape,
    any_shape,
    assert_agrees,
    draw_inputs,
    needs_triton,
)

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


def test_only_the_new_tokens_slots_of_this_layer_are_written() -> None:
    inputs = draw_inputs(Shape(ROWS, block_size=BLOCK_SIZE))
    before = inputs.pool.nan_to_num(7.0)
    inputs.run(ReferenceAttention())
    changed = (before != inputs.pool.nan_to_num(7.0)).any(dim=(2, 3, 5)).nonzero().tolist()
    tables = inputs.batch.block_tables.tolist()
    assert {tuple(place) for place in changed} == {
        (table[position // BLOCK_SIZE], LAYER, position % BLOCK_SIZE)
        for table, (cached, new) in zip(tables, ROWS, strict=True)
        for position in range(cached, cached + new)
    }


def test_a_device_without_a_backend_has_the_reference_and_an_unknown_name_is_refused_with_the_known() -> None:
    assert isinstance(attention_for(torch.device("meta")), ReferenceAttention)
    with pytest.raises(FieldOutOfRange, match="reference, cpu"):
        attention_named("flash")


@pytest.mark.long
def test_a_cpu_needs_no_triton() -> None:
    program = "import sys; sys.modules['triton'] = None\nimport app.gpu.startup.loader, torch\n"
    program += "app.gpu.attention.attention_for(torch.device('cpu'))"
    subprocess.run([sys.executable, "-c", program], check=True)


FLOAT32, BFLOAT16, FLOAT16, FLOAT8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
LIMITED = AttentionSpec(scale=0.3, window=33, softcap=2.0)
SHAPES: dict[str, Shape] = {
    "heads of 12": Shape(MIXED, head_dim=12),
    "heads of 64": Shape(MIXED, head_dim=64, spec=AttentionSpec(0.125)),
    "heads of 256": Shape(MIXED, head_dim=256, spec=AttentionSpec(0.0625)),
    "a group of 20": Shape([(40, 1), (3, 1), (9, 12)], heads=20, kv_heads=1),
    "flat scores": Shape(MIXED, spec=AttentionSpec(1e-4)),
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
INTERPRETED = ("float16", "float32 over float8, limited")
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
    if backend == "cuda" and BFLOAT16 in (shape.dtype, shape.pool_dtype) and not CUDA:
        pytest.skip(NO_BFLOAT16)
    assert_agrees(backend, shape, tolerance=1e-4 if shape.dtype is FLOAT32 else 0.02)


@given(any_shape())
def test_any_batch_on_a_cpu(shape: Shape) -> None:
    assert_agrees("cpu", shape)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=needs_triton)])
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
