"""CUDA graphs on a CUDA device. When the engine replays is tested in test_graph_runs.py."""

import random
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.gpu.device.hardware import DeviceMemory
from app.gpu.forward.graphs import CudaRecorder, Graphs, layer_by_layer, run_piece
from app.gpu.kernels.attention import attention_for
from app.gpu.kernels.attention.base import Batch, make_batch
from app.gpu.kv.pools import KVPool
from app.gpu.models import load_stack
from app.gpu.models.base import TOLERANCE, LayerStack
from app.gpu.startup.kv import estimate_graph_bytes
from app.gpu.startup.loader import record_graphs
from app.model_store.resolve import resolve

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs are recorded on a CUDA device only"),
]

BLOCK, BLOCKS, ROWS = 16, 40, 20
CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def load(dtype: torch.dtype, folder: Path) -> LayerStack:
    model = resolve("random:tiny-llama", cache_dir=folder)
    return load_stack(model, device=CUDA, dtype=dtype, attention=attention_for(CUDA))


def record(stack: LayerStack, pool: KVPool) -> Graphs:
    graphs = record_graphs(stack, pool, ROWS, 8, CudaRecorder(stack.device))
    assert graphs is not None
    return graphs


def draw_step(chance: random.Random, stack: LayerStack) -> tuple[Tensor, Batch]:
    """Sequences of any length, each in blocks of its own."""
    rows, blocks = chance.randint(1, ROWS), list(range(BLOCKS))
    chance.shuffle(blocks)
    spans = [(chance.randrange(2 * BLOCK), 1) for _ in range(rows)]
    tables = [[blocks.pop() for _ in range(first // BLOCK + 1)] for first, _ in spans]
    token_ids = torch.tensor([chance.randrange(stack.vocab_size) for _ in spans], device=stack.device)
    return token_ids, make_batch(spans, tables, BLOCK, stack.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_a_replay_computes_what_the_step_does(dtype: torch.dtype, tmp_path: Path) -> None:
    stack = load(dtype, tmp_path)
    pool = KVPool(stack, BLOCKS, BLOCK)
    graphs, chance = record(stack, pool), random.Random(5)
    pool.data.normal_(generator=torch.Generator("cuda").manual_seed(1))
    for _ in range(30):
        token_ids, batch = draw_step(chance, stack)
        kv = pool.data.clone()
        expected = run_piece(stack, layer_by_layer(stack, pool), 0, stack.num_layers + 1, token_ids, batch)
        written = pool.data.clone()
        pool.data.copy_(kv)
        found = graphs.replay_whole(token_ids, batch)
        error = ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
        assert float(error) < TOLERANCE[dtype]
        torch.testing.assert_close(pool.data, written, rtol=5e-2, atol=5e-2)
        untouched = (written == kv).flatten(1).all(dim=1)
        assert torch.equal(pool.data[untouched], kv[untouched])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_parts_of_a_step_compute_what_the_step_does(dtype: torch.dtype, tmp_path: Path) -> None:
    stack = load(dtype, tmp_path)
    pool, chance = KVPool(stack, BLOCKS, BLOCK), random.Random(6)
    graphs, layers = record(stack, pool), stack.num_layers
    run_layers, replayed = layer_by_layer(stack, pool), 0
    pool.data.normal_(generator=torch.Generator("cuda").manual_seed(1))
    for _ in range(60):
        token_ids, batch = draw_step(chance, stack)
        kv = pool.data.clone()
        expected = run_piece(stack, run_layers, 0, stack.num_layers + 1, token_ids, batch)
        pool.data.copy_(kv)
        graphs.take(token_ids, batch, None)
        parts = [graphs.run(0, 1), graphs.run(1, layers), graphs.run(layers, layers + 1)]
        error = ((graphs.logits[: len(token_ids)] - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
        assert float(error) < TOLERANCE[dtype]
        written = pool.data.clone()
        graphs.record_due()
        assert torch.equal(pool.data, written)
        replayed += all(parts)
    assert replayed


def test_work_that_waits_or_fails_is_refused_and_leaves_the_device_as_it_was() -> None:
    recorder, x = CudaRecorder(CUDA), torch.ones(8, device=CUDA)
    stream, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    calls = iter([False, True])

    def wait() -> None:
        x.mul_(float(x.sum()))

    def fail_later() -> None:
        if next(calls):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        x.add_(1.0)

    with pytest.raises(RuntimeError, match="synchronizing"):
        recorder.record(wait)
    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(fail_later, concurrent=True)
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == mode
    for concurrent in (False, True):
        x.fill_(1.0)
        replay = recorder.record(lambda: _add_one(x), concurrent=concurrent)
        x.fill_(5.0)
        replay()
        replay()
        assert x.tolist() == [7.0] * 8


def _add_one(tensor: Tensor) -> None:
    tensor.add_(1.0)


def test_no_capture_begins_within_that_of_another_thread() -> None:
    first, second, begun = CudaRecorder(CUDA), CudaRecorder(CUDA), threading.Event()
    x, y = torch.zeros(8, device=CUDA), torch.zeros(8, device=CUDA)

    def record_too() -> None:
        with torch.inference_mode():
            begun.set()
            second.record(lambda: _add_one(y), concurrent=True)

    other = threading.Thread(target=record_too)

    def start_other() -> None:
        x.add_(1.0)
        if torch.cuda.is_current_stream_capturing():
            other.start()
            assert begun.wait(10)

    replay = first.record(start_other, concurrent=True)
    other.join(10)
    x.zero_()
    replay()
    assert x.tolist() == [1.0] * 8


def test_smaller_graphs_take_no_tensors_of_their_own() -> None:
    recorder, memory = CudaRecorder(CUDA), DeviceMemory(CUDA)
    weight, output = torch.randn(2048, 2048, device=CUDA), torch.empty(2048, 2048, device=CUDA)
    free = [memory.free()]
    replays = []
    for rows in (2048, 1024, 512):

        def work(rows: int = rows) -> None:
            x = weight[:rows]
            for _ in range(4):
                x = x @ weight
            output[:rows].copy_(x)

        replays.append(recorder.record(work))
        free.append(memory.free())
    assert free[0] - free[1] >= 2048 * 2048 * 4
    assert free[1] - free[3] < 2048 * 2048


def test_what_graphs_take_is_about_what_was_estimated(tmp_path: Path) -> None:
    stack = load(torch.bfloat16, tmp_path)
    recorder, memory = CudaRecorder(stack.device), DeviceMemory(stack.device)
    estimated = estimate_graph_bytes(stack, BLOCK, ROWS, 8, recorder, memory, stack.dtype)
    pool = KVPool(stack, BLOCKS, BLOCK)
    free = memory.free()
    graphs = record_graphs(stack, pool, ROWS, 8, recorder)
    assert graphs is not None
    assert free - memory.free() <= estimated + (64 << 20)
