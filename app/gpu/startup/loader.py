"""Putting an engine together: model, KV pool sized to the machine, scheduler, handlers."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from app.domain.values import ModelInfo
from app.gpu.attention import attention_for
from app.gpu.attention.batch import make_batch
from app.gpu.attention.pool_rows import require_rows
from app.gpu.commands.checkpoints import CheckpointHandler
from app.gpu.commands.dispatch import CommandHandler
from app.gpu.commands.inspection import Inspector
from app.gpu.cpu.compilations import COMPILATIONS
from app.gpu.cpu.openmp import release_threads
from app.gpu.device.choice import choose_device, choose_dtype, choose_kv_dtype
from app.gpu.device.dtypes import dtype_name
from app.gpu.engine import Engine
from app.gpu.graphs.decode import DecodeGraphs, DecodeLimits, Recorder
from app.gpu.graphs.recorder import choose_recorder
from app.gpu.graphs.recording import record_graphs
from app.gpu.graphs.runs import RunGraphs
from app.gpu.kv.header import KVLayout
from app.gpu.kv_pools.device import KVPool
from app.gpu.kv_pools.mover import KVMover
from app.gpu.kv_tiers.phases import Phases
from app.gpu.models.base import LayerStack
from app.gpu.planning.turns import Turns
from app.gpu.programs.run import RunLayers, layer_by_layer
from app.gpu.ranks.layers import LeadingLayers, LeadingStack
from app.gpu.ranks.leader import Die, end_process
from app.gpu.sampling.masks import WORD, apply_mask
from app.gpu.startup.drafts import choose_draft_tokens
from app.gpu.startup.kv import find_files, make_kv
from app.gpu.startup.ranks import start_ranks
from app.gpu.startup.scheduling import make_scheduler
from app.gpu.startup.weights import LoadedModel, load_model
from app.gpu.state.activation_room import ActivationRoom
from app.gpu.step.activations import HostTensor
from app.gpu.step.progress import Progress
from app.gpu.step.runner import Runner
from app.gpu.weight_ring.loan import KVLoans
from app.grammars.compiler import Grammars
from app.machine.disk import DiskRoom
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
    stack = loaded.stack
    if recorder is None and loaded.ranks is None:
        recorder = choose_recorder(settings.cuda_graphs, stack.device, streamed=loaded.streamed is not None)
    kv_dtype = choose_kv_dtype(settings.kv_dtype, stack.dtype)
    require_rows(kv_dtype, stack.head_dim)
    _warm_up(stack, settings.block_size, kv_dtype)
    kv = make_kv(model, loaded, settings, kv_dtype, recorder, room)
    pool, borrower, limit = kv.pool, kv.borrower, kv.max_model_len
    draft_tokens = choose_draft_tokens(model, settings, stack.device, stack.dtype)
    scheduler = make_scheduler(stack, settings, kv, draft_tokens)
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
    mover = KVMover(kv.host, kv.identity, kv.disk)
    handler = CommandHandler(
        scheduler,
        phases,
        turns,
        checkpoints,
        inspector=inspector,
        files=find_files(kv.disk),
        discard=mover.connections.discard,
        ways=mover.prompts,
    )
    return Engine(
        _describe(model.name, stack, limit, kv.identity.layout),
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
