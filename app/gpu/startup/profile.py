"""The budget of a GPU's memory beside weights: measured on the loaded model, before there is a KV pool."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.domain.values import SamplingParams
from app.gpu.device.memory import DeviceMemory
from app.gpu.device.staging import put_each
from app.gpu.forward.pieces import layer_by_layer, whole_pass
from app.gpu.kernels.attention.base import make_batch
from app.gpu.kv.pools import KVPool
from app.gpu.models.base import LayerStack
from app.gpu.sampling.requests import SampleRequest
from app.gpu.sampling.sampler import choose, log_probabilities, place_requests
from app.machine.units import size
from app.settings import EngineSettings

logger = logging.getLogger(__name__)

KEPT_SHARE = 0.03
"""Share of all memory that is left free for what is not measured: fragments, edits, steering vectors, one more module
of the driver. A step that finds too little runs in parts, so this need not cover the worst case."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a GPU's memory. `kv` may be negative."""

    total: int
    free: int
    """Before there is a KV pool."""
    step: int
    graphs: int

    @property
    def kept(self) -> int:
        """Bytes that are left free."""
        return int(self.total * KEPT_SHARE)

    @property
    def kv(self) -> int:
        """Bytes that are left for KV."""
        return self.free - self.step - self.graphs - self.kept

    def check(self, pool_bytes: int) -> None:
        """Warn if a KV pool of this size leaves too little for a step. Raises FieldOutOfRange if it does not fit."""
        room = self.free - self.graphs
        left = room - pool_bytes
        if left < 0:
            raise FieldOutOfRange(
                f"kv_device is {size(pool_bytes)}; there is room for {size(room)}, of which steps need "
                f"{size(self.step)}",
                param="kv_device",
            )
        if pool_bytes > self.kv:
            logger.warning(
                "kv_device leaves %s, and a step takes up to %s: large ones will run in parts",
                size(left),
                size(self.step),
            )


def plan_memory(
    stack: LayerStack, settings: EngineSettings, memory: DeviceMemory, graph_bytes: int, kv_dtype: torch.dtype
) -> MemoryPlan:
    """Measure the largest steps over KV of `kv_dtype`; `graph_bytes` is what CUDA graphs take once there is a pool.

    Raises FieldOutOfRange if not even a step fits beside the weights.
    """
    free = memory.free()
    try:
        step = largest_step(stack, settings, memory, kv_dtype)
    except torch.OutOfMemoryError:
        raise FieldOutOfRange(
            f"a step of {settings.max_step_tokens} tokens does not fit into the {size(free)} that the "
            "weights leave free, without any KV: lower max_step_tokens or max_running",
            param="max_step_tokens",
        ) from None
    plan = MemoryPlan(memory.total(), memory.free(), step, graph_bytes)
    sizes = (plan.total, plan.total - plan.free, plan.step, plan.graphs, plan.kept, plan.kv)
    logger.info(
        "%s has %s: taken %s, a step up to %s, graphs %s, left alone %s; %s for KV",
        stack.device,
        *map(size, sizes),
    )
    return plan


@torch.inference_mode()
def largest_step(stack: LayerStack, settings: EngineSettings, memory: DeviceMemory, kv_dtype: torch.dtype) -> int:
    """Bytes that a step takes for a while beside weights and KV, at most.

    Two steps are run over a pool of one block, which is all that their block tables name: as many prompt tokens as a
    step may have, at the end of the longest context and all of them scored; and as many sessions as may decode at once,
    one of them with that context, with the costliest sampling.
    """
    pool = KVPool(stack, 1, settings.block_size, dtype=kv_dtype)
    context = max(1, min(stack.max_model_len, memory.free() * settings.block_size // pool.data.nbytes))
    length = min(settings.max_step_tokens, context)
    rows, rest = divmod(settings.max_step_tokens, length)
    prompts = [(context - n, n) for n in ([rest] if rest else []) + [length] * rows]
    decodes = [(context - 1, 1), *[(0, 1)] * (settings.max_running - 1)]

    def score() -> None:
        log_probabilities(_run(stack, pool, prompts)).topk(1)

    def decode() -> None:
        logits = _run(stack, pool, decodes)
        request = SampleRequest(SamplingParams(seed=0, top_p=0.5), frozenset(), position=1)
        raw = log_probabilities(logits)  # reported once the token has been chosen
        inputs = place_requests([request] * len(decodes), stack.vocab_size, put_each(stack.device))
        choose(logits, inputs, on_host=stack.device.type == "cpu")
        del raw

    return max(_peak(memory, score), _peak(memory, decode))


def _peak(memory: DeviceMemory, step: Callable[[], None]) -> int:
    memory.reset_peak()
    step()
    return memory.peak()


def _run(stack: LayerStack, pool: KVPool, spans: list[Span]) -> Tensor:
    tables = [[0] * -(-(first + length) // pool.block_size) for first, length in spans]
    batch = make_batch(spans, tables, pool.block_size, stack.device)
    return whole_pass(stack, layer_by_layer(stack, pool), torch.zeros_like(batch.positions), batch)
