"""Recording the decode graphs when the engine starts: what memory they take, and whether what they replay is right."""

import logging
import time
from functools import partial

import torch
from torch import Tensor

from app.gpu.device.memory import DeviceMemory
from app.gpu.forward.graph_decode import DecodeGraphs, DecodeLimits, Recorder, batch_buckets
from app.gpu.forward.graph_runs import KEPT_PASSES
from app.gpu.forward.program_run import layer_by_layer
from app.gpu.forward.runner import Decode
from app.gpu.forward.walk import whole_pass
from app.gpu.kernels.attention.batch import Batch, make_batch
from app.gpu.kv.pools import KVPool
from app.gpu.models.base import TOLERANCE, LayerStack

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 2.0
CHECKED_TOKENS = 2
"""In the sequence that graphs are checked with: the shortest that has a past."""


@torch.inference_mode()
def estimate_graph_bytes(
    stack: LayerStack,
    block_size: int,
    limits: DecodeLimits,
    recorder: Recorder,
    memory: DeviceMemory,
    kv_dtype: torch.dtype,
) -> int:
    """Device memory that `record_graphs` will take, and `RunGraphs` after it, known before there is a KV pool: the
    largest and the smallest graph are recorded over a pool of one block of `kv_dtype`, and dropped. Each of the others
    counts as the smallest, because they all find their tensors' memory in what the largest has taken. 0 if the model
    cannot be recorded.
    """
    free, buckets = [memory.free()], batch_buckets(limits.rows)
    decode, graphs = _decode(stack, KVPool(stack, 1, block_size, dtype=kv_dtype)), DecodeGraphs(limits, stack.device)
    try:
        for bucket in (buckets[-1], buckets[0]):
            graphs.record(bucket, decode, recorder)
            free.append(memory.free())
    except Exception:
        return 0  # record_graphs meets the same, and says so
    finally:
        del graphs
        recorder.forget()
    return max(0, free[0] - free[1]) + max(0, free[1] - free[2]) * (len(buckets) - 1 + KEPT_PASSES)


@torch.inference_mode()
def record_graphs(stack: LayerStack, pool: KVPool, limits: DecodeLimits, recorder: Recorder) -> DecodeGraphs | None:
    """Record every bucket, the largest first, and check each. Writes to block 0 of `pool`, which must be free.

    None, and a warning that says why, if the model cannot be recorded.
    """
    decode, graphs = _decode(stack, pool), DecodeGraphs(limits, stack.device)
    began = time.perf_counter()
    logger.info("recording decode steps of up to %d sessions as %d graphs", limits.rows, len(graphs.buckets))
    try:
        _record_all(graphs, decode, recorder)
        _check(graphs, decode, stack, pool.block_size)
    except Exception as error:
        # Whatever stands against recording this model, it runs without.
        logger.warning("decode steps run without CUDA graphs: %s: %s", type(error).__name__, error)
        del graphs
        recorder.forget()
        return None
    logger.info("recorded and checked %d graphs in %.1f s", len(graphs.buckets), time.perf_counter() - began)
    return graphs


def _decode(stack: LayerStack, pool: KVPool) -> Decode:
    return partial(whole_pass, stack, layer_by_layer(stack, pool))


def _record_all(graphs: DecodeGraphs, decode: Decode, recorder: Recorder) -> None:
    told = time.perf_counter()
    for done, bucket in enumerate(reversed(graphs.buckets)):
        if time.perf_counter() - told > PROGRESS_SECONDS:
            told = time.perf_counter()
            logger.info("recorded %d of %d graphs", done, len(graphs.buckets))
        graphs.record(bucket, decode, recorder)


def _check(graphs: DecodeGraphs, decode: Decode, stack: LayerStack, block_size: int) -> None:
    """Raise RuntimeError unless every graph gives the logits of `decode`, in rows before a padding row. A model or an
    attention that keeps what it has read on the host while it is recorded gives others.
    """
    for position in range(CHECKED_TOKENS):
        expected = decode(*_step(position, 1, block_size, stack.device))
    for bucket in graphs.buckets:
        rows = max(1, bucket - 1)
        found = graphs(*_step(CHECKED_TOKENS - 1, rows, block_size, stack.device))
        error = float(((found - expected).norm(dim=-1) / expected.norm()).max())
        if not error < TOLERANCE[stack.dtype]:
            raise RuntimeError(f"logits of a batch of {rows} are off by {error:.0%} when they are replayed")


def _step(position: int, rows: int, block_size: int, device: torch.device) -> tuple[Tensor, Batch]:
    """Token `position` of `rows` times one sequence, whose token ids are its positions and whose KV is in block 0."""
    blocks = [0] * (position // block_size + 1)
    batch = make_batch([(position, 1)] * rows, [blocks] * rows, block_size, device)
    return batch.positions.clone(), batch
