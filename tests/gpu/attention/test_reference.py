"""The reference attention against Transformers' eager attention over contiguous keys and values."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from app.domain.errors import FieldOutOfRange
from app.gpu.attention import attention_for, attention_named
from app.gpu.attention.base import AttentionSpec
from app.gpu.attention.batch import make_batch
from app.gpu.attention.reference import ReferenceAttention

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 8, 4
CPU = torch.device("cpu")
# Context of each sequence, and how many of its last tokens are queries; decode rows first.
ROWS = [(9, 1), (17, 1), (1, 1), (14, 5), (8, 8), (21, 2)]
TABLES = [[4, 19, 2], [7, 0, 12, 3, 9], [15], [1, 20, 6, 11], [18, 5], [10, 23, 8, 14, 21, 13]]


@dataclass(frozen=True)
class Sequences:
    """Whole sequences, unpaged: query `[heads, tokens, head_dim]`, key and value `[kv_heads, tokens, head_dim]`."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def random(cls, dtype: torch.dtype) -> Sequences:
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int) -> list[Tensor]:
            return [torch.randn(heads, context, HEAD_DIM, generator=generator).to(dtype) for context, _ in ROWS]

        return cls(draw(HEADS), draw(KV_HEADS), draw(KV_HEADS))

    def packed(self, parts: list[Tensor]) -> Tensor:
        """The last tokens of every row, `[tokens, heads, head_dim]`."""
        return torch.cat([part[:, -count:] for part, (_, count) in zip(parts, ROWS, strict=True)], dim=1).transpose(
            0, 1
        )


class _Heads(nn.Module):
    """What Transformers' eager attention reads off the module that calls it."""

    num_key_value_groups = HEADS // KV_HEADS


def expected(sequences: Sequences, spec: AttentionSpec) -> Tensor:
    """Transformers' eager attention, one sequence at a time, over a mask written out from the definition."""
    module = _Heads()
    parts = []
    for row, (context, count) in enumerate(ROWS):
        mask = torch.full((context, context), float("-inf"))
        for query in range(context):
            oldest = 0 if spec.window is None else max(0, query - spec.window + 1)
            mask[query, oldest : query + 1] = 0.0
        output, _ = eager_attention_forward(
            module,
            sequences.queries[row][None],
            sequences.keys[row][None],
            sequences.values[row][None],
            mask.to(sequences.keys[row].dtype),
            scaling=spec.scale,
            softcap=spec.softcap,
        )
        parts.append(output[0, -count:])
    return torch.cat(parts)


def run_paged(sequences: Sequences, spec: AttentionSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's output, and the layer's pool before and after; older tokens are in the pool beforehand."""
    # One layer of a pool of three, so that blocks are not contiguous.
    pool = (torch.randn(24, 3, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, generator=torch.Generator().manual_seed(1)) * 50).to(
        dtype
    )
    layer = pool[:, 1]
    for row, (context, count) in enumerate(ROWS):
        for position in range(context - count):
            block, offset = TABLES[row][position // BLOCK_SIZE], position % BLOCK_SIZE
            layer[block, 0, :, offset] = sequences.keys[row][:, position]
            layer[block, 1, :, offset] = sequences.values[row][:, position]
    before = pool.clone()
    batch = make_batch([(context - count, count) for context, count in ROWS], TABLES, BLOCK_SIZE, CPU)
    output = ReferenceAttention()(
        sequences.packed(sequences.queries),
        sequences.packed(sequences.keys),
        sequences.packed(sequences.values),
        layer,
        batch,
        spec,
    )
    return output, before, pool


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_agrees_with_transformers(window: int | None, softcap: float | None) -> None:
    sequences = Sequences.random(torch.float32)
    spec = AttentionSpec(scale=0.3, window=window, softcap=softcap)
    output, _, _ = run_paged(sequences, spec, torch.float32)
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected(sequences, spec), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_half_precision_stays_close(dtype: torch.dtype, softcap: float | None) -> None:
    sequences = Sequences.random(dtype)
    spec = AttentionSpec(scale=0.3, softcap=softcap)
    output, _, _ = run_paged(sequences, spec, dtype)
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected(sequences, spec), rtol=0.02, atol=0.02)


def test_only_the_new_tokens_slots_of_this_layer_are_written() -> None:
    sequences = Sequences.random(torch.float32)
    _, before, after = run_paged(sequences, AttentionSpec(scale=0.3), torch.float32)
    changed = {(block, offset) for block, offset in (before != after)[:, 1].any(dim=(1, 2, 4)).nonzero().tolist()}
    new = {
        (TABLES[row][position // BLOCK_SIZE], position % BLOCK_SIZE)
        for row, (context, count) in enumerate(ROWS)
        for position in range(context - count, context)
    }
    assert changed == new
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])


def test_a_device_without_a_backend_of_its_own_runs_the_reference() -> None:
    assert isinstance(attention_for(torch.device("meta")), ReferenceAttention)


def test_a_cpu_needs_no_triton() -> None:
    program = "import sys; sys.modules['triton'] = None\nimport app.gpu.startup.loader, torch\n"
    program += "app.gpu.attention.attention_for(torch.device('cpu'))"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(FieldOutOfRange, match="reference, cpu"):
        attention_named("flash")
