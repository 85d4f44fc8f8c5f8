"""The CUDA attention, in Triton's interpreter or on a CUDA device, and what only it promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.attention.drawing import (
    CUDA,
    DEVICES,
    NO_BFLOAT16,
    Inputs,
    Shape,
    any_shape,
    assert_agrees,
    chunks,
    draw_inputs,
)
from tests.gpu.attention.flash_on_cpu import FLASH_ATTENTION

pytest.importorskip("triton", reason="Triton is not installed")

from app.gpu.attention import attention_for, cuda
from app.gpu.attention.base import AttentionSpec
from app.gpu.attention.batch import Batch, make_batch
from app.gpu.attention.cuda import CudaAttention
from app.gpu.attention.triton_attend import Sequences
from app.gpu.attention.triton_merge import MAX_SPLITS

DEVICE = DEVICES["cuda"]
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not CUDA, reason=NO_BFLOAT16)),
]


@settings(max_examples=10)
@given(any_shape())
def test_any_batch_agrees_with_the_reference(shape: Shape) -> None:
    assert_agrees("cuda", shape)


@settings(max_examples=6)
@given(any_shape())
def test_any_batch_agrees_with_the_reference_in_the_batch_invariant_mode(shape: Shape) -> None:
    assert_agrees("cuda-batch-invariant", shape)


class OperatorsSeen(TorchDispatchMode):
    """What PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Callable[..., Any]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


PLAIN = AttentionSpec(0.1)


@pytest.mark.parametrize("row", [(0, 50), (70, 30)], ids=["no past", "a past"])
@pytest.mark.parametrize(
    ("head_dim", "spec", "takes"),
    [
        (64, PLAIN, True),
        (12, PLAIN, True),
        (256, PLAIN, True),
        (264, PLAIN, False),
        (64, AttentionSpec(0.1, window=100), True),
        (64, AttentionSpec(0.1, window=40), False),
        (64, AttentionSpec(0.1, softcap=2.0), False),
    ],
)
def test_prompts_run_in_flash_attention_where_it_takes_them(
    row: tuple[int, int], head_dim: int, spec: AttentionSpec, takes: bool
) -> None:
    shape = Shape([row], head_dim=head_dim, dtype=torch.float16, pool_dtype=torch.float16, spec=spec)
    with OperatorsSeen() as operators:
        assert_agrees("cuda", shape, tolerance=0.02)
    assert operators.seen.count(FLASH_ATTENTION) == takes


def split_into(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def splits(rows: Sequences, kv: Tensor, spec: AttentionSpec) -> int:
        return count

    monkeypatch.setattr(cuda, "_splits", splits)


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (150, 2.0)])
def test_splitting_the_keys_changes_no_result(
    splits: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_into(splits, monkeypatch)
    rows = [(0, 1), (128, 1), (500, 1)]
    assert_agrees("cuda", Shape(rows, head_dim=12, spec=AttentionSpec(scale=0.3, window=window, softcap=softcap)))


@pytest.mark.parametrize("splits", [1, 5])
def test_not_a_number_shows(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_into(splits, monkeypatch)
    inputs = draw_inputs(Shape([(300, 1), (300, 1)]), device=DEVICE)
    inputs.key[1, 0, 0] = float("nan")
    broken = inputs.run(CudaAttention()).isnan()
    assert not broken[0].any()
    assert broken[1, :3].all()
    assert not broken[1, 3:].any()


def padded(inputs: Inputs, rows: int) -> Inputs:
    """The same decode rows with so many padding rows behind them, as a graph's bucket has them."""

    def grown(x: Tensor, padding: float) -> Tensor:
        return torch.cat((x, x.new_full((rows, *x.shape[1:]), padding)))

    batch = inputs.batch
    padded_batch = Batch(
        rows=(),
        decodes=batch.decodes + rows,
        positions=grown(batch.positions, 0),
        slot_blocks=grown(batch.slot_blocks, -1),
        slot_offsets=grown(batch.slot_offsets, 0),
        block_tables=grown(batch.block_tables, 0),
        contexts=grown(batch.contexts, 0),
    )
    query, key, value = (grown(x, 7.0) for x in (inputs.query, inputs.key, inputs.value))
    return Inputs(query, key, value, inputs.pool.clone(), padded_batch, inputs.spec)


@pytest.fixture
def _dirty_memory() -> Iterator[None]:
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_dirty_memory")
@pytest.mark.parametrize("splits", [1, 3])
def test_padding_rows_give_zeros_and_write_nothing(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_into(splits, monkeypatch)
    inputs = draw_inputs(Shape([(0, 1), (300, 1)]), device=DEVICE)
    bucket = padded(inputs, rows=3)
    expected, output = inputs.run(CudaAttention()), bucket.run(CudaAttention())
    assert torch.equal(output[:2], expected)
    assert not output[2:].any()
    torch.testing.assert_close(bucket.pool, inputs.pool, rtol=0, atol=0, equal_nan=True)


def test_block_tables_may_hold_anything_past_the_context() -> None:
    """As a graph's do, which keep entries of earlier steps."""
    inputs = draw_inputs(Shape([(20, 1), (300, 1)]), device=DEVICE)
    expected = inputs.run(CudaAttention())
    inputs.batch.block_tables[0, 2:] = torch.iinfo(torch.int32).max
    assert torch.equal(inputs.run(CudaAttention()), expected)


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [AttentionSpec(0.3), AttentionSpec(0.3, window=37, softcap=5.0)], ids=["plain", "all"])
def test_cutting_a_prompt_changes_no_bit_in_the_batch_invariant_mode(dtype: torch.dtype, spec: AttentionSpec) -> None:
    shape = Shape([(40, 60)], heads=3, kv_heads=1, head_dim=64, dtype=dtype, pool_dtype=dtype, spec=spec)
    attention = CudaAttention(batch_invariant=True)
    whole = draw_inputs(shape, device=DEVICE).run(attention)
    cuts = [(40, 1), (41, 2), (43, 27), (70, 1), (71, 29)]
    pieces = [chunk.run(attention) for chunk in chunks(draw_inputs(shape, device=DEVICE), cuts)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rest_of_the_batch_and_the_place_of_blocks_change_no_bit_in_the_batch_invariant_mode(
    dtype: torch.dtype,
) -> None:
    rows = [(140, 1), (20, 1), (5, 20), (30, 12)]
    together = draw_inputs(Shape(rows, dtype=dtype, pool_dtype=dtype), device=DEVICE)
    attention = CudaAttention(batch_invariant=True)
    output = together.run(attention)
    for index, row in enumerate(together.batch.rows):
        alone = moved(together, index).run(attention)
        assert torch.equal(alone, output[row.start : row.start + row.length])


def moved(inputs: Inputs, index: int) -> Inputs:
    """One row of `inputs` alone, in a pool of its own whose blocks are in reverse order."""
    row = inputs.batch.rows[index]
    blocks = len(inputs.pool)
    table = [blocks - 1 - block for block in inputs.batch.block_tables[index].tolist()]
    batch = make_batch([(row.context - row.length, row.length)], [table], inputs.pool.shape[4], DEVICE)
    return inputs.narrowed(slice(row.start, row.start + row.length), inputs.pool.flip(0), batch)


@pytest.mark.parametrize("rows", [1, 5, 8, 33, 128, 1000])
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
@pytest.mark.parametrize("blocks", [1, 20, 4096])
def test_a_small_grid_is_split_to_fill_the_device(
    rows: int, kv_heads: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_processors", lambda device: 132)
    kv = torch.empty(2, 2, kv_heads, 16, 128, device="meta")
    tables = torch.empty(rows, blocks, dtype=torch.int32, device="meta")
    query, contexts = torch.empty(rows, kv_heads, 128, device="meta"), torch.empty(rows, device="meta")
    sequences = Sequences(query, tables, contexts, length=1)
    splits = cuda._splits(sequences, kv, AttentionSpec(1.0))
    programs, most, enough = rows * kv_heads, max(1, min(MAX_SPLITS, blocks * 16 // cuda.SPLIT_KEYS)), 4 * 132
    assert 1 <= splits <= most
    assert splits == most or programs * splits >= enough
    assert splits == 1 or programs * (splits - 1) < enough
    assert cuda._splits(sequences, kv, AttentionSpec(1.0, window=64)) == 1


def test_a_pool_of_more_than_two_to_the_31_elements() -> None:
    block = 2**30
    memory = torch.empty(2 * block + 2 * 16 * 64, dtype=torch.float16, device=DEVICE)  # only what is used is touched
    far = memory.as_strided((3, 2, 1, 16, 64), (block, 16 * 64, 16 * 64, 64, 1))
    near = torch.randn(3, 2, 1, 16, 64, device=DEVICE).half()
    far.copy_(near)
    batch = make_batch([(40, 1), (0, 1)], [[2, 0, 2], [1]], 16, DEVICE)
    query, key, value = torch.randn(3, 2, 1, 64, device=DEVICE).half()
    spec = AttentionSpec(0.125)
    output = CudaAttention()(query, key, value, far, batch, spec)
    assert torch.equal(output, CudaAttention()(query, key, value, near, batch, spec))
    assert torch.equal(far, near)


def test_cuda_devices_get_the_cuda_attention() -> None:
    device = torch.device("cuda", 3)
    assert isinstance(attention_for(device), CudaAttention)
    assert isinstance(attention_for(device, batch_invariant=True), CudaAttention)
