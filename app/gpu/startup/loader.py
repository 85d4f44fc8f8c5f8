"""Putting an engine together: model, KV pool sized to the machine, scheduler, handlers."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from app.domain.values import KVPolicy, ModelInfo
from app.gpu.attention import attention_for
from app.gpu.attention.batch import make_batch
from app.gpu.attention.pool_rows import require_rows
from app.gpu.commands.checkpoints import CheckpointHandler
from app.gpu.commands.dispatch import CommandHandler
from app.gpu.commands.inspection import Inspector
from app.gpu.commands.saved_files import FilesFound, SavedKV
from app.gpu.cpu.compilations import COMPILATIONS
from app.gpu.cpu.openmp import release_threads
from app.gpu.device.choice import choose_device, choose_dtype, choose_kv_dtype
from app.gpu.device.dtypes import dtype_name
from app.gpu.device.memory import CudaMemory, allocating
from app.gpu.engine import Engine
from app.gpu.graphs.decode import DecodeGraphs, DecodeLimits, Recorder
from app.gpu.graphs.recorder import choose_recorder
from app.gpu.graphs.recording import estimate_graph_bytes, record_graphs
from app.gpu.graphs.runs import RunGraphs
from app.gpu.kv.blocks import BlockPool
from app.gpu.kv.disk import DiskStore
from app.gpu.kv.header import KVIdentity, KVLayout
from app.gpu.kv_pools.device import KVPool
from app.gpu.kv_pools.host import HostPool
from app.gpu.kv_pools.mover import KVMover
from app.gpu.kv_tiers.cache import KVCache
from app.gpu.kv_tiers.moving import KVTiers
from app.gpu.kv_tiers.phases import Phases
from app.gpu.kv_tiers.placement import Placement
from app.gpu.models.base import LayerStack
from app.gpu.planning.drafting import Drafting
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns
from app.gpu.programs.run import RunLayers, layer_by_layer
from app.gpu.ranks.layers import LeadingLayers, LeadingStack
from app.gpu.ranks.leader import Die, end_process
from app.gpu.ranks.pools import LeadingHostPool, LeadingPool
from app.gpu.sampling.masks import WORD, apply_mask
from app.gpu.startup.budgets import TierBlocks, budget_blocks
from app.gpu.startup.drafts import choose_draft_tokens
from app.gpu.startup.profile import MemoryPlan, plan_memory
from app.gpu.startup.ranks import start_ranks
from app.gpu.startup.weights import LoadedModel, load_model
from app.gpu.state.activation_room import ActivationRoom
from app.gpu.step.activations import HostTensor
from app.gpu.step.progress import Progress
from app.gpu.step.runner import Runner
from app.gpu.weight_ring.loan import Borrower, KVLoans, LoanBook, lend_nothing
from app.grammars.compiler import Grammars
from app.machine.disk import DiskRoom
from app.machine.units import counted, size
from app.model_store.fingerprint import fingerprint
from app.model_store.resolve import ResolvedModel
from app.settings import EngineSettings

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 32


def load_engine(
    model: ResolvedModel, settings: EngineSettings, room: DiskRoom | None = None, die: Die = end_process
) -> Engine:
    """Load the weights and allocate the KV pool. `room` is that for KV files; None: the whole disk. `die` ends this
    process if another rank is lost. Takes seconds; raises DjinnError if the settings do not fit the model.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    choose_kv_dtype(settings.kv_dtype, dtype)  # a mistake is told before the weights are read
    logger.info("loading %s as %s on %s", model.name, dtype_name(dtype), device)
    began = time.perf_counter()
    attention = attention_for(device, batch_invariant=settings.batch_invariant)
    ranks = start_ranks(model, settings, device, dtype, die)
    with COMPILATIONS.telling(), ExitStack() as undo:
        if ranks is not None:
            undo.callback(ranks.close)
        loaded = load_model(model, settings, device, dtype, attention, ranks)
        undo.pop_all()
        weighed = time.perf_counter()
        try:
            engine = build_engine(model, loaded, settings, room=room)
        except BaseException:
            loaded.close()
            raise
    seconds = weighed - began, time.perf_counter() - weighed
    logger.info("loaded: weights in %.1f s, kernels and room for KV in %.1f s", *seconds)
    release_threads()  # the engine will run on a thread of its own
    return engine


def build_engine(
    model: ResolvedModel,
    loaded: LoadedModel,
    settings: EngineSettings,
    recorder: Recorder | None = None,
    *,
    room: DiskRoom | None = None,
) -> Engine:
    """An engine around a loaded model. `recorder` records decode steps; None: chosen by device and settings."""
    stack, ranks = loaded.stack, 1 if loaded.ranks is None else loaded.ranks.count
    if recorder is None and loaded.ranks is None:
        recorder = choose_recorder(settings.cuda_graphs, stack.device, streamed=loaded.streamed is not None)
    kv_dtype = choose_kv_dtype(settings.kv_dtype, stack.dtype)
    require_rows(kv_dtype, stack.head_dim)
    kv_heads = stack.kv_heads * ranks
    layout = KVLayout(stack.num_layers, kv_heads, settings.block_size, stack.head_dim, dtype_name(kv_dtype))
    _warm_up(stack, settings.block_size, kv_dtype)
    plan = _plan_memory(stack, settings, recorder, kv_dtype)
    disk_room = None if settings.kv_dir is None else _room_of_files(settings.kv_dir, room)
    budgets = budget_blocks(settings, layout.block_bytes, None if plan is None else plan.kv * ranks, disk_room)
    if plan is not None:
        plan.check(budgets.device * layout.block_bytes // ranks)
    pool, borrower = _allocate_device(loaded, budgets.device, layout, kv_dtype)
    host = _allocate_host(loaded, pool, budgets.host, layout)
    if loaded.ranks is not None:
        loaded.ranks.join(budgets.device, budgets.host)
    identity = KVIdentity(fingerprint(model), stack.vocab_size, layout)
    disk = _open_disk(settings, identity, disk_room, budgets.disk)
    limit = min(stack.max_model_len, budgets.device * settings.block_size)
    _log_budgets(budgets, layout, limit, stack.max_model_len)
    draft_tokens = choose_draft_tokens(model, settings, stack.device, stack.dtype)
    scheduler = _make_scheduler(stack, settings, budgets, layout.block_bytes, borrower, limit, draft_tokens)
    phases = Phases(scheduler.placement, scheduler.headroom)
    rows = DecodeLimits(settings.max_running, -(-limit // settings.block_size), stack.vocab_size)
    graphs, runs = _record(stack, pool, rows, recorder)
    grammars = Grammars(model, stack.vocab_size)
    activations = ActivationRoom(settings.max_activation_bytes)
    turns = Turns(scheduler, limit, grammars.match, activations)
    progress = Progress()
    run_layers = _choose_layers(loaded, pool, limit, progress.note, can_record=recorder is None)
    whole = stack if loaded.ranks is None else LeadingStack(loaded.ranks, stack)
    runner = Runner(whole, pool, loaded.streams, run_layers, graphs, runs)
    to_host = partial(HostTensor.of, streams=loaded.streams)
    checkpoints = CheckpointHandler(scheduler.placement, runner.predict, to_host, grammars.match, activations)
    inspector = Inspector(scheduler, loaded.text, runner.counts, activations.use)
    mover = KVMover(host, identity, disk)
    handler = CommandHandler(
        scheduler,
        phases,
        turns,
        checkpoints,
        inspector=inspector,
        files=_find_files(disk),
        discard=mover.connections.discard,
        ways=mover.prompts,
    )
    return Engine(
        _describe(model.name, stack, limit, layout),
        scheduler,
        phases,
        runner,
        turns,
        handler,
        mover,
        None if borrower is None else KVLoans(borrower, scheduler.placement, scheduler.headroom, pool.copy_blocks),
        grammars,
        progress,
        loaded.close,
    )


def _room_of_files(folder: Path, room: DiskRoom | None) -> DiskRoom:
    return DiskRoom(folder) if room is None else room.beside(folder)


def _open_disk(settings: EngineSettings, identity: KVIdentity, room: DiskRoom | None, blocks: int) -> DiskStore | None:
    """Where KV files are. A full disk leaves none for new ones, but those of an earlier server must be known all the
    same: they give way to the journal.
    """
    folder = settings.kv_dir
    if folder is None or settings.kv_policy is KVPolicy.NONE:
        return None
    has_files = settings.kv_disk is None and folder.is_dir() and any(folder.iterdir())
    return DiskStore(folder, identity, room) if blocks or has_files else None


def _choose_layers(
    loaded: LoadedModel, pool: KVPool, max_model_len: int, on_layer: Callable[[], None], *, can_record: bool
) -> RunLayers:
    """How layers run: recorded where that saves time and their weights stay where they are, and here."""
    if loaded.ranks is not None:
        return LeadingLayers(loaded.ranks, layer_by_layer(loaded.stack, pool, on_layer))
    if can_record and loaded.streams.on_host and loaded.streamed is None:
        from app.gpu.programs.layers import RecordedLayers  # imports Numba, which only a CPU needs

        return RecordedLayers(loaded.stack, pool, max_model_len, on_layer)
    return layer_by_layer(loaded.stack, pool, on_layer)


def _record(
    stack: LayerStack, pool: KVPool, limits: DecodeLimits, recorder: Recorder | None
) -> tuple[DecodeGraphs | None, RunGraphs | None]:
    """Whole decode steps, and what will record runs of their layers; None where nothing is to be, or can be."""
    graphs = None if recorder is None else record_graphs(stack, pool, limits, recorder)
    if recorder is None or graphs is None:
        return None, None
    return graphs, RunGraphs(stack, layer_by_layer(stack, pool), graphs, recorder)


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
    return pool, Borrower(LoanBook(arena), loaded.streamed.text)


def _allocate_host(loaded: LoadedModel, pool: KVPool, blocks: int, layout: KVLayout) -> HostPool:
    with allocating("kv_host", blocks * layout.block_bytes):
        if loaded.ranks is not None:
            return LeadingHostPool(loaded.ranks, pool, blocks, loaded.streams)
        return HostPool(pool, blocks, loaded.streams)


def _make_scheduler(
    stack: LayerStack,
    settings: EngineSettings,
    budgets: TierBlocks,
    block_bytes: int,
    borrower: Borrower | None,
    max_model_len: int,
    draft_tokens: int,
) -> Scheduler:
    """The scheduler, with the placement and the block pools that it plans with."""
    cache = KVCache(BlockPool(budgets.device, settings.block_size), BlockPool(budgets.host, settings.block_size))
    borrow = lend_nothing if borrower is None else borrower.borrow
    drafting = Drafting(
        cache,
        max_tokens=draft_tokens,
        num_layers=stack.num_layers,
        max_model_len=max_model_len,
        exact_draws=stack.device.type == "cpu",
    )
    return Scheduler(
        Placement(KVTiers(cache, block_bytes), settings.kv_policy, budgets.disk, time.monotonic, borrow),
        drafting,
        num_layers=stack.num_layers,
        max_step_tokens=settings.max_step_tokens,
        max_running=settings.max_running,
        shared_prompt_tokens=-(-settings.max_step_tokens // _steps_shared(stack, borrower)),
        shared_rows=_shared_rows(settings, stack, borrower),
        prompts_rest=stack.device.type == "cpu" and borrower is None,  # elsewhere a step costs much without them too
    )


def _steps_shared(stack: LayerStack, borrower: Borrower | None) -> int:
    """What part of a step prompts have while there are other turns: the inverse. On a CPU nearly all of a step's time
    goes with its tokens. On a GPU the weights are read in each. Streamed weights are a sweep, whatever it computes.
    """
    if borrower is not None:
        return 1
    return 4 if stack.device.type == "cpu" else 2


def _shared_rows(settings: EngineSettings, stack: LayerStack, borrower: Borrower | None) -> int:
    """How many turns of one tenant decode in a step while others have turns: fewer than it may have, where each row
    makes the step longer.
    """
    if borrower is not None or stack.device.type != "cpu":
        return settings.max_running
    return max(16, settings.max_step_tokens // 16)


def _plan_memory(
    stack: LayerStack, settings: EngineSettings, recorder: Recorder | None, kv_dtype: torch.dtype
) -> MemoryPlan | None:
    """None on a CPU, whose memory is taken page by page and by others too."""
    if stack.device.type != "cuda":
        return None
    memory, graph_bytes = CudaMemory(stack.device), 0
    if recorder is not None:
        limits = DecodeLimits(settings.max_running, -(-stack.max_model_len // settings.block_size), stack.vocab_size)
        graph_bytes = estimate_graph_bytes(stack, settings.block_size, limits, recorder, memory, kv_dtype)
    return plan_memory(stack, settings, memory, graph_bytes, kv_dtype)


def _log_budgets(budgets: TierBlocks, layout: KVLayout, limit: int, max_model_len: int) -> None:
    for tier, blocks in (("device", budgets.device), ("host", budgets.host), ("disk", budgets.disk)):
        sessions = counted(blocks * layout.block_size // limit, "session")
        logger.info("KV on %s: %s, %s of %d tokens", tier, size(blocks * layout.block_bytes), sessions, limit)
    if limit < max_model_len:
        logger.warning(
            "sessions are limited to %d tokens, not the model's %d: kv_device holds no more", limit, max_model_len
        )


def _find_files(disk: DiskStore | None) -> FilesFound:
    """The KV files of an earlier server."""
    if disk is None:
        return FilesFound()
    index = disk.index()
    if index.refused:
        logger.warning("KV files that are damaged or of another model or layout: %d", len(index.refused))
    if index.headers:
        logger.info("sessions with KV on disk from an earlier server: %d", len(index.headers))
    saved = {
        session: SavedKV(header.token_ids, header.computed_tokens, header.namespace)
        for session, header in index.headers.items()
    }
    return FilesFound(saved, index.refused)


@torch.inference_mode()
def _warm_up(stack: LayerStack, block_size: int, kv_dtype: torch.dtype) -> None:
    """Run a decode row and a prompt through one layer, and mask logits. Then no client waits for kernels to be
    compiled, and the memory of loaded kernels is not counted as that of a step or a graph.
    """
    blocks = -(-WARM_UP_TOKENS // block_size)
    batch = make_batch([(0, 1), (0, WARM_UP_TOKENS)], [[0], range(1, blocks + 1)], block_size, stack.device)
    pool = KVPool(stack, blocks + 1, block_size, dtype=kv_dtype).layer(0)
    hidden = stack.embed(torch.zeros_like(batch.positions), batch.positions)
    apply_mask(
        stack.head(stack.layer(0, hidden, batch, pool)),
        torch.zeros(1, dtype=torch.int64, device=stack.device),
        torch.zeros((1, -(-stack.vocab_size // WORD)), dtype=torch.int32, device=stack.device),
    )


def _describe(name: str, stack: LayerStack, max_model_len: int, layout: KVLayout) -> ModelInfo:
    return ModelInfo(
        name=name,
        max_model_len=max_model_len,
        vocab_size=stack.vocab_size,
        num_layers=stack.num_layers,
        hidden_size=stack.hidden_size,
        kv_heads=layout.kv_heads,
        head_dim=stack.head_dim,
        dtype=dtype_name(stack.dtype),
        device=str(stack.device),
        parameter_bytes=stack.parameter_bytes,
        kv_bytes_per_token=layout.block_bytes // layout.block_size,
        kv_dtype=layout.dtype,
    )
