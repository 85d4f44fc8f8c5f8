"""Putting an engine together: model, KV pool sized to the machine, runner, scheduler, handlers."""

import logging
import time
from contextlib import ExitStack
from functools import partial

from app.domain.values import ModelInfo
from app.gpu.commands.dispatch import CommandHandler
from app.gpu.commands.inspection import Inspector
from app.gpu.commands.whitebox import Whitebox
from app.gpu.device.choice import choose_device, choose_dtype, choose_kv_dtype, dtype_name
from app.gpu.engine import Engine, Progress
from app.gpu.forward.boundary import HostTensor
from app.gpu.forward.graphs import Recorder
from app.gpu.forward.recording import choose_recorder
from app.gpu.kernels.attention import attention_for
from app.gpu.kernels.attention.base import require_rows
from app.gpu.kernels.cpu import release_threads, telling_of_compilation
from app.gpu.kernels.linear.base import MatmulPrecision
from app.gpu.kv.loan import KVLoans
from app.gpu.kv.mover import KVMover
from app.gpu.kv.phases import Phases
from app.gpu.kv.pools import HostPool
from app.gpu.kv.stream import OpenWay, SocketTransport
from app.gpu.models.base import LayerStack
from app.gpu.planning.turns import Turns
from app.gpu.ranks.leader import Die, end_process
from app.gpu.startup.drafts import choose_draft_tokens
from app.gpu.startup.kv import find_files, make_kv
from app.gpu.startup.products import attends_in_bfloat16, choose_products
from app.gpu.startup.ranks import start_ranks
from app.gpu.startup.running import make_runner, warm_up
from app.gpu.startup.scheduling import make_scheduler
from app.gpu.startup.weights import LoadedModel, load_model
from app.gpu.state.kv_header import KVLayout
from app.gpu.state.sequence import ActivationRoom
from app.grammars.compiler import Grammars
from app.machine.disk import DiskRoom
from app.model_store.resolve import ResolvedModel
from app.settings import EngineSettings

logger = logging.getLogger(__name__)


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
    products = choose_products(settings, model, device, dtype)
    in_bfloat16 = not settings.batch_invariant and attends_in_bfloat16(model, products)
    if products is not MatmulPrecision.FLOAT32:
        logger.info("multiplied in bfloat16: %s", "all" if in_bfloat16 else "matrices that are kept in bfloat16")
    attention = attention_for(device, batch_invariant=settings.batch_invariant, in_bfloat16=in_bfloat16)
    ranks = start_ranks(model, settings, device, dtype, die)
    with telling_of_compilation(), ExitStack() as undo:
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
    warm_up(stack, settings.block_size, kv_dtype)
    kv = make_kv(model, loaded, settings, kv_dtype, recorder, room)
    borrower, limit = kv.borrower, kv.max_model_len
    draft_tokens = choose_draft_tokens(model, settings, stack.device)
    scheduler = make_scheduler(stack, settings, kv, draft_tokens)
    phases = Phases(scheduler.placement, scheduler.headroom)
    progress = Progress()
    runner = make_runner(loaded, settings, kv, recorder, progress.note)
    grammars = Grammars(model, stack.vocab_size)
    activations = ActivationRoom(settings.max_activation_bytes)
    turns = Turns(scheduler, limit, grammars.match, activations)
    to_host = partial(HostTensor.of, streams=loaded.streams)
    whitebox = Whitebox(scheduler.placement, runner.predict, to_host, grammars.match, activations)
    inspector = Inspector(scheduler, loaded.text, runner.counts, activations.use)
    mover = KVMover(kv.host, kv.identity, kv.disk, _open_way(settings, kv.host))
    saved, refused = find_files(kv.disk)
    handler = CommandHandler(
        scheduler,
        phases,
        turns,
        whitebox,
        inspector,
        saved=saved,
        refused=refused,
        transports=mover.prompts,
    )
    return Engine(
        _describe(model.name, stack, limit, kv.identity.layout),
        scheduler,
        phases,
        runner,
        turns,
        handler,
        mover,
        None if borrower is None else KVLoans(borrower, scheduler.placement, scheduler.headroom, kv.pool.copy_blocks),
        grammars,
        progress,
        loaded.close,
    )


def _open_way(settings: EngineSettings, host: HostPool) -> OpenWay:
    """How prompts go from server to server."""
    if settings.prefill_transport != "nixl":
        return SocketTransport
    from app.gpu.kv.nixl import NixlAgent, NixlTransport

    return partial(NixlTransport, agent=NixlAgent(host.data if settings.computes_prompts else None))


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
