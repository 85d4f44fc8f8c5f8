"""The CUDA attention, in Triton's interpreter or on a CUDA device, and what only it promises."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.kernels.attention.drawing import (
    CUDA,
    DEVICES,
    MIXED,
    NO_BFLOAT16,
    Inputs,
    Shape,
    any_shape,
    assert_agrees,
    chunks,
    draw_inputs,
    needs_cuda,
)

pytest.importorskip("triton", reason="Triton is not installed")

from app.gpu.forward.graphs import waiting_forbidden
from app.gpu.kernels.attention import cuda
from app.gpu.kernels.attention.base import AttentionSpec, Batch, make_batch

DEVICE = DEVICES["cuda"]
DTYPES = [
    pytest.param(torch.float32, marks=pytest.mark.long),
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not CUDA, reason=NO_BFLOAT16)),
]


PLAIN = AttentionSpec(0.3)
FLASH_ATTENTION = torch.ops.aten._flash_attention_forward.default


@settings(max_examples=settings().max_examples // 10)  # each takes a second in the interpreter
@given(any_shape())
def test_any_batch_agrees_with_the_reference(shape: Shape) -> None:
    for backend in ("cuda", "cuda-batch-invariant"):
        assert_agrees(backend, shape)


class OperatorsSeen(TorchDispatchMode):
    """What PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


NEW = [(5, 1), (0, 20), (0, 2), (0, 33)]


@pytest.mark.parametrize(
    ("rows", "head_dim", "spec", "takes"),
    [
        (NEW, 64, PLAIN, True),
        (NEW, 12, PLAIN, True),
        (NEW, 256, PLAIN, True),
        (NEW, 264, PLAIN, False),
        (NEW, 64, AttentionSpec(0.3, window=20), True),
        (NEW, 64, AttentionSpec(0.3, softcap=2.0), False),
        ([*NEW, (70, 30)], 64, PLAIN, False),
    ],
)
def test_new_prompts_run_in_flash_attention_together_where_it_takes_them(
    rows: list[tuple[int, int]], head_dim: int, spec: AttentionSpec, takes: bool
) -> None:
    shape = Shape(rows, head_dim=head_dim, dtype=torch.float16, pool_dtype=torch.float16, spec=spec)
    with OperatorsSeen() as operators:
        assert_agrees("cuda", shape, tolerance=0.02)
    assert operators.seen.count(FLASH_ATTENTION) == takes


PROMPTS = [(0, 2), (0, 35), (17, 3), (64, 20), (140, 2), (1, 16)]
"""Chunks of several lengths, with and without a context, whose tiles end in the middle of others'."""


@pytest.mark.parametrize(
    ("decodes", "heads", "dtype", "pool_dtype", "spec"),
    [
        (3, 2, torch.float32, torch.float32, PLAIN),
        (0, 10, torch.float16, torch.float16, AttentionSpec(0.3, window=20)),
        (3, 20, torch.float16, torch.float8_e4m3fn, AttentionSpec(0.3, window=100, softcap=2.0)),
    ],
)
def test_prompts_of_all_rows_run_in_one_launch(
    decodes: int,
    heads: int,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    spec: AttentionSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched, attend = list[int](), cuda.attend

    def noted(query: Tensor, *rest: Any, **options: Any) -> None:
        launched.append(len(query))
        attend(query, *rest, **options)

    monkeypatch.setattr(cuda, "attend", noted)
    rows = [(n, 1) for n in range(decodes)] + PROMPTS
    shape = Shape(rows, heads, 2, head_dim=12, dtype=dtype, pool_dtype=pool_dtype, spec=spec)
    assert_agrees("cuda", shape, tolerance=1e-4 if dtype is torch.float32 else 0.02)
    assert launched == [*([decodes] if decodes else []), sum(length for _, length in PROMPTS)]


@pytest.fixture(params=[1, 132], ids=["keys whole", "keys split"])
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Multiprocessors of the device, for all of which keys are cut into parts."""
    count: int = request.param
    monkeypatch.setattr(cuda, "_processors", lambda device: count)
    return count


@pytest.mark.parametrize(
    ("processors", "spec", "has_sinks"),
    [(1, PLAIN, True), (132, PLAIN, False), (132, AttentionSpec(0.3, window=300, softcap=2.0), True)],
    indirect=["processors"],
)
def test_splitting_the_keys_changes_no_result(processors: int, spec: AttentionSpec, has_sinks: bool) -> None:
    for rows in ([(0, 1), (128, 1), (390, 1)], [(0, 5), (256, 9)]):
        shape = Shape(rows, head_dim=12, spec=spec, has_sinks=has_sinks)
        assert_agrees("cuda", shape)
        whole, found = (
            draw_inputs(shape, device=DEVICE).run(partial(cuda.attend_on_cuda, batch_invariant=each))
            for each in (True, False)
        )
        assert torch.equal(found, whole) == (processors == 1), "whether they are split"


@pytest.mark.usefixtures("processors")
def test_not_a_number_shows() -> None:
    inputs = draw_inputs(Shape([(300, 1), (300, 1)]), device=DEVICE)
    inputs.key[1, 0, 0] = float("nan")
    broken = inputs.run(cuda.attend_on_cuda).isnan()
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
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_dirty_memory", "processors")
def test_padding_rows_give_zeros_and_write_nothing() -> None:
    inputs = draw_inputs(Shape([(0, 1), (300, 1)]), device=DEVICE)
    bucket = padded(inputs, rows=3)
    expected, output = inputs.run(cuda.attend_on_cuda), bucket.run(cuda.attend_on_cuda)
    assert torch.equal(output[:2], expected)
    assert not output[2:].any()
    torch.testing.assert_close(bucket.pool, inputs.pool, rtol=0, atol=0, equal_nan=True)


def test_block_tables_may_hold_anything_past_the_context() -> None:
    """As a graph's do, which keep entries of earlier steps."""
    inputs = draw_inputs(Shape([(20, 1), (300, 1)]), device=DEVICE)
    expected = inputs.run(cuda.attend_on_cuda)
    inputs.batch.block_tables[0, 2:] = torch.iinfo(torch.int32).max
    assert torch.equal(inputs.run(cuda.attend_on_cuda), expected)


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [PLAIN, AttentionSpec(0.3, window=37, softcap=5.0)], ids=["plain", "limited"])
@pytest.mark.parametrize("head_dim", [64, *(pytest.param(each, marks=needs_cuda) for each in (80, 128, 256))])
def test_cutting_a_prompt_changes_no_bit_in_the_batch_invariant_mode(
    head_dim: int, dtype: torch.dtype, spec: AttentionSpec
) -> None:
    shape = Shape([(40, 60)], heads=3, kv_heads=1, head_dim=head_dim, dtype=dtype, pool_dtype=dtype, spec=spec)
    attention = partial(cuda.attend_on_cuda, batch_invariant=True)
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
    attention = partial(cuda.attend_on_cuda, batch_invariant=True)
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


def test_a_pool_of_more_than_two_to_the_31_elements() -> None:
    block = 2**30
    memory = torch.empty(2 * block + 2 * 16 * 64, dtype=torch.float16, device=DEVICE)  # only what is used is touched
    far = memory.as_strided((3, 2, 1, 16, 64), (block, 16 * 64, 16 * 64, 64, 1))
    near = torch.randn(3, 2, 1, 16, 64, device=DEVICE).half()
    far.copy_(near)
    batch = make_batch([(40, 1), (0, 1)], [[2, 0, 2], [1]], 16, DEVICE)
    query, key, value = torch.randn(3, 2, 1, 64, device=DEVICE).half()
    spec = AttentionSpec(0.125)
    output = cuda.attend_on_cuda(query, key, value, far, batch, spec)
    assert torch.equal(output, cuda.attend_on_cuda(query, key, value, near, batch, spec))
    assert torch.equal(far, near)


SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""That one program may take. Of compute capability 8.x, what the consumer devices have, which run the same binaries
(CUDA C++ Programming Guide, table of technical specifications)."""

MULTIPLY = {"_attend", "_matmul"}
"""Kernels that are for tensor cores, which multiply no float32."""
PRODUCTS = {"product", "product of experts", "product of int8", "product of float8"}
"""What `_matmul` is for."""


RARE = pytest.param(100, "usual", marks=pytest.mark.rare)  # a multiprocessor has the memory of one of 9.0


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("capability", "shapes"), [(80, "usual"), (90, "few"), RARE])
def test_the_kernels_compile_fit_and_spill_no_registers(capability: int, shapes: str, tmp_path: Path) -> None:
    """Triton's interpreter takes what its compiler refuses, and the compiler needs no device."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.compile.child", str(capability), shapes]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    kernels = [json.loads(line) for line in output.splitlines()]
    assert kernels
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert kernel["stack_bytes"] <= 16, kernel
        assert kernel["programs"] >= 1, kernel
    products = [each for each in kernels if each["kernel"] in MULTIPLY and each["dtype"] != "float32"]
    assert {each["kernel"] for each in products} == MULTIPLY
    wanted = PRODUCTS - ({"product of float8"} if capability < 89 else set())
    assert {each["purpose"] for each in products if each["kernel"] == "_matmul"} == wanted
    assert [each for each in products if not each["mma"] + each["wgmma"]] == [], "these use no tensor cores"


# On a CUDA device.


def on_a_device(test: Any) -> Any:
    """The test shows what Triton's interpreter cannot."""
    return pytest.mark.cuda(needs_cuda(test))


LONG = [(0, 1), (2047, 1), (4000, 1), (100, 1), (0, 700), (1000, 300)]
HALVES = [torch.bfloat16, torch.float16]


@on_a_device
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


@on_a_device
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_host_never_waits_for_the_device(batch_invariant: bool) -> None:
    inputs = draw_inputs(Shape(MIXED, head_dim=64, dtype=torch.float16, pool_dtype=torch.float16), device=DEVICE)
    with waiting_forbidden():
        inputs.run(partial(cuda.attend_on_cuda, batch_invariant=batch_invariant))


@on_a_device
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_recorded_decode_step_follows_what_its_tensors_hold_at_replay(batch_invariant: bool) -> None:
    dtype = torch.bfloat16
    attention = partial(cuda.attend_on_cuda, batch_invariant=batch_invariant)
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
