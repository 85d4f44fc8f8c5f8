"""How many KV blocks each tier gets, and whether the weights fit."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.domain.values import KVBudget, KVPolicy, SamplingParams, WeightsDtype
from app.gpu.device.hardware import DeviceMemory, dtype_name
from app.gpu.device.streams import put_each
from app.gpu.forward.graphs import layer_by_layer, run_piece
from app.gpu.kernels.attention.base import make_batch
from app.gpu.kv.pools import KVPool
from app.gpu.models import can_be_streamed
from app.gpu.models.base import LayerStack, with_new_states
from app.gpu.sampling import SampleRequest
from app.gpu.sampling.sampler import choose, log_probabilities, place_requests
from app.gpu.weights.source import TensorFormat
from app.machine.files import DiskRoom, size
from app.machine.memory import read_host_memory
from app.model_store.resolve import ResolvedModel
from app.model_store.tensors import StoredSize, stored_sizes
from app.settings import EngineSettings

logger = logging.getLogger(__name__)

HOST_SHARE = 0.25
"""Default share of the free host memory, which other programs need too. On a CPU, device and host get as much each."""
DISK_SHARE = 0.1
"""Default share of the disk that is free beside the reserve."""


@dataclass(frozen=True, slots=True)
class TierBlocks:
    """Blocks of each tier."""

    device: int
    host: int
    disk: int


def budget_blocks(
    settings: EngineSettings, block_bytes: int, device_room: int | None, disk_room: DiskRoom | None = None
) -> TierBlocks:
    """Blocks of `block_bytes` bytes for each tier, by the settings or else by the free memory.

    `device_room` is the memory of a GPU for KV, in bytes; None on a CPU, whose device memory is the host's. `disk_room`
    is that for KV files; None: there are none. Raises `FieldOutOfRange` unless the device gets at least one block, and
    so does each lower tier that is asked for. With policy `none` KV never leaves the device, so the lower tiers get no
    blocks. KV goes to disk over host memory, so without a block there the disk gets none.
    """

    def blocks(asked: KVBudget | None, default_bytes: float) -> int:
        budget = KVBudget(bytes=max(0, int(default_bytes))) if asked is None else asked
        return budget.blocks(block_bytes, settings.block_size)

    def lower_blocks(name: str, asked: KVBudget | None, free_bytes: int, share: float) -> int:
        found = blocks(asked, free_bytes * share)
        if asked is not None and asked.bytes and not found:
            raise FieldOutOfRange(
                f"{name} must be 0, or hold at least one block of {block_bytes} bytes; got {asked.bytes} bytes",
                param=name,
            )
        return found

    free = read_host_memory().free_bytes
    on_device = blocks(settings.kv_device, free * HOST_SHARE if device_room is None else device_room)
    if on_device < 1:
        found = "" if settings.kv_device is not None else f"; weights and steps leave {device_room} bytes"
        raise FieldOutOfRange(
            f"kv_device must hold at least one block of {block_bytes} bytes{found}", param="kv_device"
        )
    if settings.kv_policy is KVPolicy.NONE:
        return TierBlocks(on_device, 0, 0)
    on_host = lower_blocks("kv_host", settings.kv_host, free, HOST_SHARE)
    if disk_room is None or not on_host:
        if disk_room is not None and settings.kv_disk != KVBudget():
            logger.warning("--kv-disk: KV goes to disk over --kv-host, which holds no block, so no KV goes there")
        return TierBlocks(on_device, on_host, 0)
    on_disk = lower_blocks("kv_disk", settings.kv_disk, disk_room.free, DISK_SHARE)
    if disk_room.missing and (on_disk or settings.kv_disk is None):
        until = " until that is free" if on_disk else ""
        logger.warning("--disk-reserve: the disk lacks %s of it, so no KV goes there%s", size(disk_room.missing), until)
    return TierBlocks(on_device, on_host, on_disk)


def weight_bytes(model: ResolvedModel, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of all parameters on `device`, matrices as the model keeps them there, all others as `dtype`. On a CPU an
    output projection that is tied to the embedding is a second copy, in the layout in which it is multiplied.
    """
    text = model.config.get_text_config()
    table: tuple[int, int] = (text.vocab_size, text.hidden_size)
    tied = bool(text.tie_word_embeddings) and device.type == "cpu"
    tensor_format = TensorFormat(device, dtype, model.weights_dtype if can_be_streamed(model) else WeightsDtype.FLOAT32)
    if model.folder is None or getattr(model.config, "quantization_config", None) is not None:
        stored = _random_sizes(model, dtype)
    else:
        stored = stored_sizes(model.folder)
    tables = [tensor_format.nbytes(each) for each in stored.values() if each.shape == table]
    return sum(map(tensor_format.nbytes, stored.values())) + (max(tables, default=0) if tied else 0)


def _random_sizes(model: ResolvedModel, dtype: torch.dtype) -> dict[str, StoredSize]:
    """As `stored_sizes`, of weights that are made as `dtype`, at random or of quantized ones."""
    from transformers import AutoModelForCausalLM  # imports much of Transformers

    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(model.config).named_parameters()
    return {name: StoredSize(tuple(each.shape), each.numel() * dtype.itemsize) for name, each in parameters}


def free_bytes(device: torch.device) -> int:
    """Free bytes of the device's memory."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_host_memory().free_bytes


def check_weights_fit(model: ResolvedModel, needed: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `FieldOutOfRange` if fewer than `needed` bytes are free on `device`, where these weights are kept."""
    free = free_bytes(device)
    if needed > free:
        raise FieldOutOfRange(
            f"the weights of {model.name} need {size(needed)} for {dtype_name(dtype)}; "
            f"{size(free)} are free on {device}. Llama-like models and GPT-2 need less: see weights_device",
            param="weights_device",
        )


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
    batch = with_new_states(stack, make_batch(spans, tables, pool.block_size, stack.device))
    token_ids, stages = torch.zeros_like(batch.positions), stack.num_layers + 1
    return run_piece(stack, layer_by_layer(stack, pool), 0, stages, token_ids, batch)
