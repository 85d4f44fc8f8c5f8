"""KV of an engine: its layout, and memory and files, sized to the machine and what steps and graphs take of a GPU."""

import logging
from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.domain.values import KVBudget, KVPolicy, SamplingParams
from app.gpu.device.hardware import DeviceMemory, allocating, dtype_name
from app.gpu.device.streams import put_each
from app.gpu.forward.graphs import KEPT_PASSES, CudaRecorder, Graphs, layer_by_layer, run_piece
from app.gpu.kernels.attention.base import make_batch
from app.gpu.kv.cache import KVCache
from app.gpu.kv.file import DiskStore
from app.gpu.kv.pools import HostPool, KVPool
from app.gpu.models.base import LayerStack, with_new_states
from app.gpu.planning.admission import Borrower
from app.gpu.ranks.leader import LeadingHostPool, LeadingPool
from app.gpu.sampling import SampleRequest
from app.gpu.sampling.sampler import choose, log_probabilities, place_requests
from app.gpu.startup.weights import LoadedModel
from app.gpu.state.blocks import BlockPool
from app.gpu.state.kv_header import KVIdentity, KVLayout
from app.gpu.state.layer_state import divide, keeps_tokens, state_bytes
from app.machine.budget import DiskRoom
from app.machine.files import counted, size
from app.machine.memory import read_host_memory
from app.model_store.resolve import ResolvedModel, fingerprint
from app.settings import EngineSettings

logger = logging.getLogger(__name__)

HOST_SHARE = 0.25
"""Default share of the free host memory, which other programs need too. On a CPU, device and host get as much each."""
DISK_SHARE = 0.1
"""Default share of the disk that is free beside the reserve."""
KEPT_SHARE = 0.03
"""Share of all memory that is left free for what is not measured: fragments, edits, steering vectors, one more module
of the driver. A step that finds too little runs in parts, so this need not cover the worst case."""
STATE_EVERY = 256
"""Fewest tokens between two states that are kept on the way through a prompt."""


def budget_blocks(
    settings: EngineSettings,
    block_bytes: int,
    device_room: int | None,
    disk_room: DiskRoom | None = None,
    groups: int = 1,
    extra_blocks: int = 0,
) -> tuple[int, int, int]:
    """Blocks of `block_bytes` bytes for device, host and disk, by the settings or else by the free memory. The KV of
    the same tokens takes one for each of so many `groups` of layers. Beside its tokens, a session's state takes
    `extra_blocks`.

    `device_room` is the memory of a GPU for KV, in bytes; None on a CPU, whose device memory is the host's. `disk_room`
    is that for KV files; None: there are none. Raises `FieldOutOfRange` unless the device gets at least one block, and
    so does each lower tier that is asked for. With policy `none` lower tiers get none; nor does the disk without a
    block on the host, over which its KV comes.
    """

    def blocks(asked: KVBudget | None, default_bytes: float) -> int:
        budget = KVBudget(bytes=max(0, int(default_bytes))) if asked is None else asked
        of_tokens = budget.blocks(block_bytes * groups, settings.block_size) * groups
        return of_tokens + budget.sessions * extra_blocks

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
        return on_device, 0, 0
    on_host = lower_blocks("kv_host", settings.kv_host, free, HOST_SHARE)
    if disk_room is None or not on_host:
        if disk_room is not None and settings.kv_disk != KVBudget():
            logger.warning("--kv-disk: KV goes to disk over --kv-host, which holds no block, so no KV goes there")
        return on_device, on_host, 0
    on_disk = lower_blocks("kv_disk", settings.kv_disk, disk_room.free, DISK_SHARE)
    if disk_room.missing and (on_disk or settings.kv_disk is None):
        until = " until that is free" if on_disk else ""
        logger.warning("--disk-reserve: the disk lacks %s of it, so no KV goes there%s", size(disk_room.missing), until)
    return on_device, on_host, on_disk


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a GPU's memory. `kv` may be negative."""

    total: int
    free: int
    """Before there is a KV pool."""
    step: int
    graphs: int
    adapters: int = 0
    """That LoRA adapters and uploads of clients may take, and most of which none has yet."""

    @property
    def kept(self) -> int:
        """Bytes that are left free."""
        return int(self.total * KEPT_SHARE)

    @property
    def kv(self) -> int:
        """Bytes that are left for KV."""
        return self.free - self.step - self.graphs - self.adapters - self.kept

    def check(self, pool_bytes: int) -> None:
        """Warn if a KV pool of this size leaves too little for a step. Raises FieldOutOfRange if it does not fit."""
        room = self.free - self.graphs - self.adapters
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
    """Measure the largest steps over KV of `kv_dtype`. Raises FieldOutOfRange if they do not fit beside the weights."""
    free = memory.free()
    try:
        step = largest_step(stack, settings, memory, kv_dtype)
    except torch.OutOfMemoryError:
        raise FieldOutOfRange(
            f"a step of {settings.max_step_tokens} tokens does not fit into the {size(free)} that the "
            "weights leave free, without any KV: lower max_step_tokens or max_running",
            param="max_step_tokens",
        ) from None
    plan = MemoryPlan(memory.total(), memory.free(), step, graph_bytes, settings.lora_bytes + settings.upload_bytes)
    sizes = (plan.total, plan.total - plan.free, plan.step, plan.graphs, plan.kept, plan.kv)
    logger.info(
        "%s has %s: taken %s, a step up to %s, graphs %s, left alone %s; %s for KV",
        stack.device,
        *map(size, sizes),
    )
    return plan


@torch.inference_mode()
def largest_step(stack: LayerStack, settings: EngineSettings, memory: DeviceMemory, kv_dtype: torch.dtype) -> int:
    """Bytes that a step takes for a while beside weights and KV, at most. Two are run over a pool of one block, which
    all their block tables name: as many prompt tokens as a step may have, at the end of the longest context and all of
    them scored; and as many decoding sessions as may be, one with that context, with the costliest sampling.
    """
    pool = KVPool(stack, 1, settings.block_size, dtype=kv_dtype)
    stripe_bytes = pool.data.nbytes * pool.groups
    context = max(1, min(stack.max_model_len, memory.free() * settings.block_size // stripe_bytes))
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

    return max(memory.peak_of(score), memory.peak_of(decode))


def _run(stack: LayerStack, pool: KVPool, spans: list[tuple[int, int]]) -> Tensor:
    tables = [[0] * -(-(first + length) // pool.block_size) * pool.groups for first, length in spans]
    batch = with_new_states(stack, make_batch(spans, tables, pool.block_size, stack.device, pool.groups))
    token_ids, stages = torch.zeros_like(batch.positions), stack.num_layers + 1
    return run_piece(stack, layer_by_layer(stack, pool), 0, stages, token_ids, batch)


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
    """Device memory that graphs of steps of up to `rows` rows, each of up to `blocks` KV blocks, will take: the largest
    and the smallest are recorded over a pool of one block of `kv_dtype`, and dropped. Each of the others, and of those
    of pieces, counts as the smallest: their tensors find room in the largest's. 0 if the model cannot be recorded.
    """
    free = [memory.free()]
    pool = KVPool(stack, 1, block_size, dtype=kv_dtype)
    graphs = Graphs(stack, layer_by_layer(stack, pool), recorder, rows, blocks, pool.groups)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KV:
    """What an engine has for KV. `cache` keeps account of the blocks in memory; files may have `disk_blocks`. Sessions
    have at most `max_model_len` tokens: the device must hold one. `borrower` borrows from weights that lend memory.
    """

    identity: KVIdentity
    cache: KVCache
    disk_blocks: int
    max_model_len: int
    pool: KVPool
    borrower: Borrower | None
    host: HostPool
    disk: DiskStore | None


def make_kv(
    model: ResolvedModel,
    loaded: LoadedModel,
    settings: EngineSettings,
    dtype: torch.dtype,
    recorder: CudaRecorder | None,
    room: DiskRoom | None,
) -> KV:
    """Allocate pools for KV of `dtype` beside the weights and what `recorder` will need, or raise FieldOutOfRange.
    `room` is that for KV files; None: the whole disk.
    """
    stack, ranks = loaded.stack, 1 if loaded.ranks is None else loaded.ranks.count
    division = divide(stack.states)
    layout = KVLayout(
        division.layers,
        stack.kv_heads * ranks,
        settings.block_size,
        stack.head_dim,
        dtype_name(dtype),
        state_bytes(stack.states),
        dtype_name(stack.dtype),
        keeps_tokens(stack.states),
        division.groups,
    )
    plan = None
    if stack.device.type == "cuda":  # a CPU's memory is taken page by page, and by others too
        memory, graph_bytes = DeviceMemory(stack.device), 0
        if recorder is not None:
            rows, blocks = settings.max_running, -(-stack.max_model_len // settings.block_size)
            graph_bytes = estimate_graph_bytes(stack, settings.block_size, rows, blocks, recorder, memory, dtype)
        plan = plan_memory(stack, settings, memory, graph_bytes, dtype)
    disk_room = None
    if settings.kv_dir is not None:
        disk_room = DiskRoom(settings.kv_dir) if room is None else room.beside(settings.kv_dir)
    device_room = None if plan is None else plan.kv * ranks
    extra_blocks = layout.state_blocks if layout.keeps_tokens else layout.state_blocks - 1
    budgets = budget_blocks(settings, layout.block_bytes, device_room, disk_room, division.groups.size, extra_blocks)
    device_blocks, host_blocks, disk_blocks = budgets
    if plan is not None:
        plan.check(device_blocks * layout.block_bytes // ranks)
    pool, borrower = _allocate_device(loaded, device_blocks, layout, dtype)
    with allocating("kv_host", host_blocks * layout.block_bytes):
        if loaded.ranks is None:
            host = HostPool(pool, host_blocks, loaded.streams)
        else:
            host = LeadingHostPool(loaded.ranks, pool, host_blocks, loaded.streams)
    if loaded.ranks is not None:
        loaded.ranks.join(device_blocks, host_blocks)
    identity = KVIdentity(fingerprint(model), stack.vocab_size, layout)
    disk = _open_disk(settings, identity, disk_room, disk_blocks)
    on_device, on_host = (
        BlockPool(
            blocks,
            pool.block_size,
            window=division.window,
            step_tokens=settings.max_step_tokens,
            state_blocks=layout.state_blocks,
            extra_blocks=extra_blocks,
            groups=division.groups,
        )
        for blocks in (device_blocks, host_blocks)
    )
    limit = on_device.longest(stack.max_model_len)
    if limit <= 0:
        raise FieldOutOfRange(
            f"kv_device must hold a session's state of {layout.state_bytes} bytes and a block of {layout.block_bytes}",
            param="kv_device",
        )
    state_every = 0
    if layout.state_bytes:  # that many tokens' KV takes as much room as a state
        state_every = max(STATE_EVERY, layout.state_blocks * layout.block_size if layout.keeps_tokens else 0)
    _log_budgets(budgets, layout, on_device.kept_for(limit), limit, stack.max_model_len)
    fits = bisect_right(range(1, limit + 1), host_blocks, key=on_host.kept_for)
    if host_blocks and fits < limit:
        logger.warning(
            "--kv-host: it has room for a session of %d tokens at most; KV of longer ones goes neither there nor to "
            "disk; 1x%d has room for any session",
            fits,
            limit,
        )
    return KV(
        identity=identity,
        cache=KVCache(on_device, on_host, hash_tokens=settings.block_size, state_every=state_every),
        disk_blocks=disk_blocks,
        max_model_len=limit,
        pool=pool,
        borrower=borrower,
        host=host,
        disk=disk,
    )


def _open_disk(settings: EngineSettings, identity: KVIdentity, room: DiskRoom | None, blocks: int) -> DiskStore | None:
    """Where KV files are. Those of an earlier server must be known on a full disk too: the journal may need room."""
    folder = settings.kv_dir
    if folder is None or settings.kv_policy is KVPolicy.NONE:
        return None
    has_files = settings.kv_disk is None and folder.is_dir() and any(folder.iterdir())
    return DiskStore(folder, identity, room) if blocks or has_files else None


def _allocate_device(
    loaded: LoadedModel, blocks: int, layout: KVLayout, dtype: torch.dtype
) -> tuple[KVPool, Borrower | None]:
    """The pool of KV: its own memory, or memory beside weights that lend theirs. Of ranks each has a part."""
    if loaded.ranks is not None:
        with allocating("kv_device", blocks * layout.block_bytes // loaded.ranks.count):
            return LeadingPool(loaded.ranks, loaded.stack, blocks, layout.block_size, dtype=dtype), None
    if loaded.streamed is None:
        with allocating("kv_device", blocks * layout.block_bytes):
            return KVPool(loaded.stack, blocks, layout.block_size, dtype=dtype), None
    arena, memory = loaded.streamed.share(blocks, layout.block_bytes)
    pool = KVPool(loaded.stack, arena.most_blocks, layout.block_size, memory, dtype=dtype)
    streamed = loaded.streamed
    return pool, Borrower(arena, streamed.lend, streamed.take_back, pool.copy_blocks)


def _log_budgets(budgets: tuple[int, int, int], layout: KVLayout, each: int, limit: int, max_model_len: int) -> None:
    """A session of `limit` tokens holds `each` blocks."""
    for tier, blocks in zip(("device", "host", "disk"), budgets, strict=True):
        sessions = counted(blocks // each, "session")
        logger.info("KV on %s: %s, %s of %d tokens", tier, size(blocks * layout.block_bytes), sessions, limit)
    if limit < max_model_len:
        logger.warning(
            "sessions are limited to %d tokens, not the model's %d: kv_device holds no more", limit, max_model_len
        )
