"""The CUDA attention on a CUDA device: what Triton's interpreter cannot show."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu.attention.drawing import DEVICES, MIXED, Inputs, Shape, assert_agrees, chunks, draw_inputs, needs_cuda

pytest.importorskip("triton", reason="Triton is not installed")

from app.gpu.attention.base import AttentionSpec
from app.gpu.attention.cuda import CudaAttention
from app.gpu.graphs.recorder import waiting_forbidden

pytestmark = [pytest.mark.cuda, needs_cuda]

DEVICE = DEVICES["cuda"]
LONG = [(0, 1), (2047, 1), (4000, 1), (100, 1), (0, 700), (1000, 300)]
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 32, 128), (32, 8, 128), (9, 3, 64), (8, 1, 256)])
@pytest.mark.parametrize("backend", ["cuda", "cuda-batch-invariant"])
@pytest.mark.parametrize("window", [None, 900])
def test_shapes_of_real_models(
    backend: str, heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    spec = AttentionSpec(head_dim**-0.5, window=window)
    shape = Shape(LONG, heads, kv_heads, head_dim, dtype=dtype, pool_dtype=dtype, spec=spec)
    assert_agrees(backend, shape, tolerance=0.02)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("row", [(0, 50), (70, 30)], ids=["no past", "a past"])
def test_prompts_run_in_pytorchs_flash_attention(row: tuple[int, int], dtype: torch.dtype) -> None:
    """Not in cuDNN's, whose kernels have `flash_fprop` in their names."""
    inputs = draw_inputs(Shape([row], head_dim=64, dtype=dtype, pool_dtype=dtype), device=DEVICE)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        inputs.run(CudaAttention())
        torch.cuda.synchronize()
    kernels = [event.key for event in profiler.key_averages()]
    assert any("flash_fwd" in kernel for kernel in kernels), kernels


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_host_never_waits_for_the_device(batch_invariant: bool) -> None:
    inputs = draw_inputs(Shape(MIXED, head_dim=64, dtype=torch.float16, pool_dtype=torch.float16), device=DEVICE)
    with waiting_forbidden():
        inputs.run(CudaAttention(batch_invariant=batch_invariant))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_recorded_decode_step_follows_what_its_tensors_hold_at_replay(batch_invariant: bool) -> None:
    dtype = torch.bfloat16
    attention = CudaAttention(batch_invariant=batch_invariant)
    shape = partial(Shape, heads=32, kv_heads=8, head_dim=128, dtype=dtype, pool_dtype=dtype)
    recorded = draw_inputs(shape([(3000, 1), (17, 1), (0, 1)]), device=DEVICE)
    recorded.run(attention)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = recorded.run(attention)
    for seed, shorter in enumerate([[(2999, 1), (30, 1), (12, 1)], [(2992, 1), (16, 1), (3, 1)]], start=1):
        step = draw_inputs(shape(shorter), seed, DEVICE)
        overwrite(recorded, step)
        graph.replay()
        assert torch.equal(output, step.run(attention))


def overwrite(recorded: Inputs, step: Inputs) -> None:
    """Put another step of the same widths where the recorded one reads."""
    for name in ("query", "key", "value", "pool"):
        getattr(recorded, name).copy_(getattr(step, name))
    for name in ("positions", "slot_blocks", "slot_offsets", "block_tables", "contexts"):
        getattr(recorded.batch, name).copy_(getattr(step.batch, name))


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_prompt_and_the_same_tokens_one_by_one_give_the_same_bits_in_the_batch_invariant_mode(
    head_dim: int, dtype: torch.dtype
) -> None:
    shape = Shape([(500, 40)], 8, 2, head_dim, dtype=dtype, pool_dtype=dtype, spec=AttentionSpec(head_dim**-0.5))
    attention = CudaAttention(batch_invariant=True)
    whole = draw_inputs(shape, device=DEVICE).run(attention)
    pieces = draw_inputs(shape, device=DEVICE)
    one_by_one = [token.run(attention) for token in chunks(pieces, [(500 + i, 1) for i in range(40)])]
    assert torch.equal(torch.cat(one_by_one), whole)
