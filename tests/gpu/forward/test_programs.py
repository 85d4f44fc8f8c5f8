"""Recorded layers give the bits of layers that are called one by one."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig

from app.gpu.forward.graphs import layer_by_layer
from app.gpu.forward.programs import RecordedLayers
from app.gpu.kernels.attention.base import Batch, make_batch, to_rows
from app.gpu.kernels.attention.cpu import PAGED_TOKENS, attend_on_cpu
from app.gpu.kernels.linear.base import MatmulPrecision
from app.gpu.kv.pools import KVPool
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.state.layer_state import divide
from app.model_store.resolve import resolve
from tests.gpu.models.oracle import CASES

BLOCK_SIZE, BLOCKS, POSITIONS, STEP_TOKENS = 16, 230, 600, 200
CPU = torch.device("cpu")
Span = tuple[int, int]


WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "n_embd": 64, "max_position_embeddings": 700}
WIDTHS |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "mamba_d_head": 16}
"""Whole panels."""
KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
RECORDED = ["llama-tied-biased-wide-heads", "mistral-window", "qwen2-window", "qwen3", "smollm3", "olmo2", "gpt2"]
RECORDED += ["qwen2_moe, dense and shared", "glm4_moe, groups", "gemma2", "granite", "qwen3_5", "granite 4", "lfm2"]


def load(case: str, dtype: torch.dtype = torch.float32, *, in_bfloat16: bool = False) -> LayerStack:
    fields = {**CASES[case], **WIDTHS, "n_positions": 700}
    model = replace(resolve("random:tiny-llama", cache_dir=Path()), config=AutoConfig.for_model(**fields))
    return load_stack(
        model,
        device=CPU,
        dtype=dtype,
        attention=partial(attend_on_cpu, in_bfloat16=in_bfloat16),
        max_model_len=POSITIONS,
        products=MatmulPrecision.BFLOAT16 if in_bfloat16 else MatmulPrecision.FLOAT32,
    )


@pytest.fixture(scope="module", params=RECORDED)
def stack(request: pytest.FixtureRequest) -> LayerStack:
    return load(request.param)


@pytest.fixture(scope="module")
def rounded() -> LayerStack:
    """Multiplied in bfloat16."""
    return load("llama", in_bfloat16=True)


def make_step(stack: LayerStack, pool: KVPool, spans: Sequence[Span], seed: int) -> tuple[Tensor, Batch]:
    """Rows over blocks of their own, in no order, with states of their own."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(BLOCKS, generator=generator).tolist()
    groups = divide(stack.states).groups.size
    tables = [[blocks.pop() for _ in range(-(-(first + count) // BLOCK_SIZE) * groups)] for first, count in spans]
    tokens = sum(count for _, count in spans)
    hidden = torch.randn(tokens, stack.hidden_size, generator=generator).to(stack.dtype)
    states = torch.randn(len(spans), pool.state_room // 4, generator=generator).view(torch.uint8)
    return hidden, replace(make_batch(spans, tables, BLOCK_SIZE, CPU, groups), states=states)


def pools(stack: LayerStack, dtype: torch.dtype | None = None) -> tuple[KVPool, KVPool]:
    """Two of the same contents."""
    one, other = (KVPool(stack, BLOCKS, BLOCK_SIZE, dtype=dtype) for _ in range(2))
    states = torch.randn((*one.data.shape[:-1], stack.head_dim), generator=torch.Generator().manual_seed(0))
    one.data.copy_(to_rows(states, one.data.dtype))
    other.data.copy_(one.data)
    return one, other


lengths = st.one_of(st.integers(1, PAGED_TOKENS + 2), st.integers(1, 90))
spans = st.lists(st.tuples(st.integers(0, 300), lengths), min_size=1, max_size=3).map(
    lambda rows: sorted(rows, key=lambda row: row[1] != 1)
)


@torch.inference_mode()
@given(
    steps=st.lists(st.tuples(spans, st.integers(0, 1), st.integers(0, 99)), min_size=1, max_size=4),
    kv_dtype=st.sampled_from(KV_DTYPES),
)
def test_any_steps_give_the_same_bits(
    stack: LayerStack, steps: list[tuple[list[Span], int, int]], kv_dtype: torch.dtype
) -> None:
    one, other = pools(stack, kv_dtype)
    recorded, plain = RecordedLayers(stack, one, POSITIONS, STEP_TOKENS), layer_by_layer(stack, other)
    for rows, lo, seed in steps:
        (hidden, batch), (_, same) = (make_step(stack, one, rows, seed) for _ in range(2))
        found = recorded(lo, stack.num_layers, hidden, batch)
        assert torch.equal(found, plain(lo, stack.num_layers, hidden, same))
        assert torch.equal(one.data, other.data)
        torch.testing.assert_close(batch.states, same.states, rtol=0, atol=0)


@torch.inference_mode()
@pytest.mark.parametrize(
    "rows",
    [[(0, 150)], [(9, 1), (40, 130)], [(0, 1)] * 30 + [(0, 8)] * 4 + [(0, 20)] * 5, [(0, 1)] * 64 + [(0, 100)]],
    ids=["many runs", "beside a decode", "many rows", "no more rows"],
)
def test_products_in_bfloat16_give_the_same_bits(rounded: LayerStack, rows: list[Span]) -> None:
    one, other = pools(rounded)
    hidden, batch = make_step(rounded, one, rows, seed=1)
    recorded = RecordedLayers(rounded, one, POSITIONS, STEP_TOKENS)
    found = recorded(0, rounded.num_layers, hidden, batch)
    assert torch.equal(found, layer_by_layer(rounded, other)(0, rounded.num_layers, hidden, batch))
    assert torch.equal(one.data, other.data)


@pytest.mark.parametrize(("name", "dtype"), [("gpt2-relu", torch.float32), ("llama", torch.bfloat16)])
@torch.inference_mode()
def test_half_types_and_models_that_need_other_kernels_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    stack = load(name, dtype)
    one, other = pools(stack)
    hidden, batch = make_step(stack, one, [(20, 1), (40, 3), (0, 30)], seed=1)
    recorded = RecordedLayers(stack, one, POSITIONS, STEP_TOKENS)
    found = recorded(0, stack.num_layers, hidden, batch)
    assert torch.equal(found, layer_by_layer(stack, other)(0, stack.num_layers, hidden, batch))
    assert torch.equal(one.data, other.data)
