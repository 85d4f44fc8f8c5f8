"""Recording CUDA graphs: whether to do so, how, what memory they take, and whether what they replay is right."""

import logging
import time

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.device.hardware import PROGRESS_SECONDS, DeviceMemory
from app.gpu.forward.graphs import KEPT_PASSES, CudaRecorder, Graphs, layer_by_layer, run_piece
from app.gpu.kernels.attention.base import Batch, make_batch
from app.gpu.kv.pools import KVPool
from app.gpu.models.base import TOLERANCE, LayerStack

logger = logging.getLogger(__name__)

CHECKED_TOKENS = 2
"""In the sequence that graphs are checked with: the shortest that has a past."""


def choose_recorder(
    wanted: bool | None, device: torch.device, *, streamed: bool, folds: bool = False
) -> CudaRecorder | None:
    """None is yes where it can be. Raises FieldOutOfRange for graphs on a device that has none, or of weights that are
    streamed: a graph's operations read the same addresses each time. So for a model that folds.
    """
    reason = None
    if folds:
        reason = "layers that fold tokens into a state run eagerly"
    elif device.type != "cuda":
        reason = f"the device is {device}, which has no CUDA graphs"
    elif streamed:
        reason = "weights_device does not hold all weights, and those that are streamed have no place of their own"
    if wanted and reason is not None:
        raise FieldOutOfRange(f"cuda_graphs: {reason}", param="cuda_graphs")
    return None if wanted is False or reason is not None else CudaRecorder(device)


@torch.inference_mode()
def estimate_graph_bytes(
    stack: LayerStack,
    block_size: int,
    rows: int,
    blocks: int,
    recorder: CudaRecorder,
    memory: DeviceMemory,
    kv_dtype: torch.dtype,
) -> int:
    """Device memory that graphs of steps of up to `rows` rows, each of up to `blocks` KV blocks, will take, known
    before there is a KV pool: the largest and the smallest are recorded over a pool of one block of `kv_dtype`, and
    dropped. Each of the others, and of those of pieces, counts as the smallest, because they all find their tensors'
    memory in what the largest has taken. 0 if the model cannot be recorded.
    """
    free = [memory.free()]
    pool = KVPool(stack, 1, block_size, dtype=kv_dtype)
    graphs = Graphs(stack, layer_by_layer(stack, pool), recorder, rows, blocks)
    count = len(graphs.buckets)
    try:
        for bucket in (graphs.buckets[-1], graphs.buckets[0]):
            graphs.record_whole(bucket)
            free.append(memory.free())
    except Exception:
        return 0  # record_graphs meets the same, and says so
    finally:
        del graphs
        recorder.forget()
    return max(0, free[0] - free[1]) + max(0, free[1] - free[2]) * (count - 1 + KEPT_PASSES)


@torch.inference_mode()
def record_graphs(stack: LayerStack, pool: KVPool, rows: int, blocks: int, recorder: CudaRecorder) -> Graphs | None:
    """Record whole steps of up to `rows` rows, each of up to `blocks` KV blocks, for every bucket, the largest first,
    and check each. Writes to block 0 of `pool`, which must be free.

    None, and a warning that says why, if the model cannot be recorded.
    """
    graphs = Graphs(stack, layer_by_layer(stack, pool), recorder, rows, blocks)
    began, count = time.perf_counter(), len(graphs.buckets)
    logger.info("recording decode steps of up to %d sessions as %d graphs", rows, count)
    told = began
    try:
        for done, bucket in enumerate(reversed(graphs.buckets)):
            if time.perf_counter() - told > PROGRESS_SECONDS:
                told = time.perf_counter()
                logger.info("recorded %d of %d graphs", done, count)
            graphs.record_whole(bucket)
        _check(graphs, stack, pool)
    except Exception as error:
        # Whatever the reason is, the model runs without graphs.
        logger.warning("decode steps run without CUDA graphs: %s: %s", type(error).__name__, error)
        del graphs
        recorder.forget()
        return None
    logger.info("recorded and checked %d graphs in %.1f s", count, time.perf_counter() - began)
    return graphs


def _check(graphs: Graphs, stack: LayerStack, pool: KVPool) -> None:
    """Raise RuntimeError unless every graph gives the logits of layers that are called one by one, in rows before a
    padding row. A model or an attention that keeps what it has read on the host while it is recorded gives others.
    """
    run_layers, stages = layer_by_layer(stack, pool), stack.num_layers + 1
    for position in range(CHECKED_TOKENS):
        step = _step(position, 1, pool.block_size, stack.device)
        expected = run_piece(stack, run_layers, 0, stages, *step)
    for bucket in graphs.buckets:
        rows = max(1, bucket - 1)
        found = graphs.replay_whole(*_step(CHECKED_TOKENS - 1, rows, pool.block_size, stack.device))
        error = float(((found - expected).norm(dim=-1) / expected.norm()).max())
        if not error < TOLERANCE[stack.dtype]:
            raise RuntimeError(f"logits of a batch of {rows} are off by {error:.0%} when they are replayed")


def _step(position: int, rows: int, block_size: int, device: torch.device) -> tuple[Tensor, Batch]:
    """Token `position` of `rows` times one sequence, whose token ids are its positions and whose KV is in block 0."""
    blocks = [0] * (position // block_size + 1)
    batch = make_batch([(position, 1)] * rows, [blocks] * rows, block_size, device)
    return batch.positions.clone(), batch
