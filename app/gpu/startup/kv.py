"""KV of an engine: its layout, and memory and files for it, sized to the machine."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from app.domain.errors import FieldOutOfRange
from app.domain.values import KVPolicy, SessionId
from app.gpu.device.hardware import DeviceMemory, allocating, dtype_name
from app.gpu.forward.graphs import Recorder
from app.gpu.forward.recording import estimate_graph_bytes
from app.gpu.kv.cache import KVCache
from app.gpu.kv.file import DiskStore
from app.gpu.kv.loan import Borrower
from app.gpu.kv.pools import HostPool, KVPool
from app.gpu.models.base import LayerStack
from app.gpu.ranks.leader import LeadingHostPool, LeadingPool
from app.gpu.startup.memory import MemoryPlan, TierBlocks, budget_blocks, plan_memory
from app.gpu.startup.weights import LoadedModel
from app.gpu.state.blocks import BlockPool
from app.gpu.state.kv_header import KVFileHeader, KVIdentity, KVLayout
from app.gpu.state.layer_state import keeps_tokens, kv_layers, state_bytes, window_of
from app.machine.files import DiskRoom, counted, size
from app.model_store.resolve import ResolvedModel, fingerprint
from app.settings import EngineSettings

logger = logging.getLogger(__name__)

STATE_EVERY = 256
"""Fewest tokens between two states that are kept on the way through a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KV:
    """What an engine has for KV. `cache` keeps account of the blocks in memory; files may have `disk_blocks`. Sessions
    have at most `max_model_len` tokens: the device must hold one. `borrower` borrows memory of the pool from weights;
    None: they lend none.
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
    recorder: Recorder | None,
    room: DiskRoom | None,
) -> KV:
    """Allocate pools for KV of `dtype` beside the weights and what `recorder` will need. `room` is that for KV files;
    None: the whole disk. Raises FieldOutOfRange if there is too little.
    """
    stack, ranks = loaded.stack, 1 if loaded.ranks is None else loaded.ranks.count
    kv_heads, window = stack.kv_heads * ranks, window_of(stack.states)
    layout = KVLayout(
        kv_layers(stack.states),
        kv_heads,
        settings.block_size,
        stack.head_dim,
        dtype_name(dtype),
        state_bytes(stack.states),
        dtype_name(stack.dtype),
        keeps_tokens(stack.states),
    )
    plan = _plan_memory(stack, settings, recorder, dtype)
    disk_room = None
    if settings.kv_dir is not None:
        disk_room = DiskRoom(settings.kv_dir) if room is None else room.beside(settings.kv_dir)
    budgets = budget_blocks(settings, layout.block_bytes, None if plan is None else plan.kv * ranks, disk_room)
    if plan is not None:
        plan.check(budgets.device * layout.block_bytes // ranks)
    pool, borrower = _allocate_device(loaded, budgets.device, layout, dtype)
    with allocating("kv_host", budgets.host * layout.block_bytes):
        if loaded.ranks is None:
            host = HostPool(pool, budgets.host, loaded.streams)
        else:
            host = LeadingHostPool(loaded.ranks, pool, budgets.host, loaded.streams)
    if loaded.ranks is not None:
        loaded.ranks.join(budgets.device, budgets.host)
    identity = KVIdentity(fingerprint(model), stack.vocab_size, layout)
    disk = _open_disk(settings, identity, disk_room, budgets.disk)
    extra_blocks = layout.state_blocks if layout.keeps_tokens else layout.state_blocks - 1
    on_device, on_host = (
        BlockPool(
            blocks,
            pool.block_size,
            window=window,
            step_tokens=settings.max_step_tokens,
            state_blocks=layout.state_blocks,
            extra_blocks=extra_blocks,
        )
        for blocks in (budgets.device, budgets.host)
    )
    limit = stack.max_model_len
    if on_device.most_for(limit) > budgets.device:
        limit = (budgets.device - extra_blocks) * pool.block_size
        if limit <= 0:
            raise FieldOutOfRange(
                f"kv_device must hold a session's state of {layout.state_bytes} bytes and a block of "
                f"{layout.block_bytes}",
                param="kv_device",
            )
    _log_budgets(budgets, layout, on_device.kept_for(limit), limit, stack.max_model_len)
    return KV(
        identity=identity,
        cache=KVCache(
            on_device, on_host, hash_tokens=settings.block_size, state_every=_state_every(layout, settings.block_size)
        ),
        disk_blocks=budgets.disk,
        max_model_len=limit,
        pool=pool,
        borrower=borrower,
        host=host,
        disk=disk,
    )


def _state_every(layout: KVLayout, block_size: int) -> int:
    """At least how many tokens lie between two states that are kept on the way through a prompt: so many that their KV
    takes as much room as a state.
    """
    if not layout.state_bytes:
        return 0
    return max(STATE_EVERY, layout.state_blocks * block_size if layout.keeps_tokens else 0)


def _open_disk(settings: EngineSettings, identity: KVIdentity, room: DiskRoom | None, blocks: int) -> DiskStore | None:
    """Where KV files are. A full disk leaves none for new ones, but those of an earlier server must be known all the
    same: they give way to the journal.
    """
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


def _plan_memory(
    stack: LayerStack, settings: EngineSettings, recorder: Recorder | None, kv_dtype: torch.dtype
) -> MemoryPlan | None:
    """None on a CPU, whose memory is taken page by page and by others too."""
    if stack.device.type != "cuda":
        return None
    memory, graph_bytes = DeviceMemory(stack.device), 0
    if recorder is not None:
        rows, blocks = settings.max_running, -(-stack.max_model_len // settings.block_size)
        graph_bytes = estimate_graph_bytes(stack, settings.block_size, rows, blocks, recorder, memory, kv_dtype)
    return plan_memory(stack, settings, memory, graph_bytes, kv_dtype)


def _log_budgets(budgets: TierBlocks, layout: KVLayout, each: int, limit: int, max_model_len: int) -> None:
    """A session of `limit` tokens holds `each` blocks."""
    for tier, blocks in (("device", budgets.device), ("host", budgets.host), ("disk", budgets.disk)):
        sessions = counted(blocks // each, "session")
        logger.info("KV on %s: %s, %s of %d tokens", tier, size(blocks * layout.block_bytes), sessions, limit)
    if limit < max_model_len:
        logger.warning(
            "sessions are limited to %d tokens, not the model's %d: kv_device holds no more", limit, max_model_len
        )


def find_files(disk: DiskStore | None) -> tuple[Mapping[SessionId, KVFileHeader], Collection[SessionId]]:
    """The headers of KV files that an earlier server has left, and the files that are of no use."""
    if disk is None:
        return {}, ()
    headers, refused = disk.index()
    if refused:
        logger.warning("KV files that are damaged or of another model or layout: %d", len(refused))
    if headers:
        logger.info("sessions with KV on disk from an earlier server: %d", len(headers))
    return headers, refused
