"""Putting an engine together: model, KV pool sized to the machine, CUDA graphs, runner, scheduler, handlers."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.domain.points import Point
from app.domain.values import ModelInfo
from app.gpu.commands.dispatch import CommandHandler
from app.gpu.commands.transfers import Transfers
from app.gpu.commands.whitebox import Whitebox
from app.gpu.device.hardware import PROGRESS_SECONDS, choose_kv_dtype, dtype_name
from app.gpu.engine import Engine, Progress
from app.gpu.forward.forward import Runner
from app.gpu.forward.graphs import CudaRecorder, Graphs, layer_by_layer, run_piece
from app.gpu.kernels.attention import attention_pattern
from app.gpu.kernels.attention.base import AttentionSpec, Batch, make_batch, require_rows
from app.gpu.kernels.cpu import release_threads, telling_of_compilation
from app.gpu.kernels.linear import linear_maker
from app.gpu.kernels.linear.base import MatmulPrecision
from app.gpu.kv.mover import KVMover
from app.gpu.kv.phases import Phases
from app.gpu.kv.placement import Placement
from app.gpu.kv.pools import KVPool
from app.gpu.kv.tiers import KVTiers
from app.gpu.models.adapters import Adapters, Additions
from app.gpu.models.base import TOLERANCE, LayerStack, with_new_states
from app.gpu.models.recipe import Recipe, choose_draft_tokens, choose_products
from app.gpu.models.stack import OwnStack
from app.gpu.planning.drafting import Drafting
from app.gpu.planning.queue import Fairness
from app.gpu.planning.scheduler import Scheduler
from app.gpu.planning.turns import Turns
from app.gpu.ranks.leader import Die, LeadingStack, end_process, leading_layers, start_ranks
from app.gpu.sampling.sampler import WORD, apply_mask
from app.gpu.startup.kv import KV, make_kv
from app.gpu.startup.weights import LoadedModel, load_model
from app.gpu.state.layer_state import state_bytes
from app.gpu.state.sequence import ActivationRoom
from app.grammars.compiler import Grammars
from app.machine.budget import DiskRoom
from app.model_store.resolve import ResolvedModel
from app.settings import EngineSettings

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 32
CHECKED_TOKENS = 2
"""In the sequence that graphs are checked with: the shortest that has a past."""


def load_engine(
    model: ResolvedModel, settings: EngineSettings, room: DiskRoom | None = None, die: Die = end_process
) -> Engine:
    """Load the weights and allocate the KV pool. `room` is that for KV files; None: the whole disk. `die` ends this
    process if another rank is lost. Takes seconds; raises DjinnError if the settings do not fit the model.
    """
    recipe, began = Recipe.choose(model, settings), time.perf_counter()
    logger.info("loading %s as %s on %s", model.name, dtype_name(recipe.dtype), recipe.device)
    if recipe.products is not MatmulPrecision.FLOAT32:
        which = "all" if recipe.attends_in_bfloat16 else "matrices that are kept in bfloat16"
        logger.info("multiplied in bfloat16: %s", which)
    ranks = start_ranks(recipe, die)
    with telling_of_compilation(), ExitStack() as undo:
        if ranks is not None:
            undo.callback(ranks.close)
        loaded = load_model(recipe, ranks)
        undo.callback(loaded.close)
        weighed = time.perf_counter()
        engine = build_engine(model, loaded, settings, room=room)
        undo.pop_all()
    seconds = weighed - began, time.perf_counter() - weighed
    logger.info("loaded: weights in %.1f s, kernels and room for KV in %.1f s", *seconds)
    release_threads()  # the engine will run on a thread of its own
    return engine


def build_engine(
    model: ResolvedModel,
    loaded: LoadedModel,
    settings: EngineSettings,
    recorder: CudaRecorder | None = None,
    *,
    room: DiskRoom | None = None,
) -> Engine:
    """An engine around a loaded model. `recorder` records decode steps; None: chosen by device and settings."""
    stack = loaded.stack
    if recorder is None and loaded.ranks is None:
        streamed, folds = loaded.streamed is not None, state_bytes(stack.states) > 0
        recorder = choose_recorder(settings.cuda_graphs, stack.device, streamed=streamed, folds=folds)
    kv_dtype = choose_kv_dtype(settings.kv_dtype, stack.dtype)
    require_rows(kv_dtype, stack.head_dim)
    warm_up(stack, settings.block_size, kv_dtype)
    kv = make_kv(model, loaded, settings, kv_dtype, recorder, room)
    layout, limit = kv.identity.layout, kv.max_model_len
    draft_tokens = choose_draft_tokens(model, settings, stack.device)
    scheduler = make_scheduler(stack, settings, kv, draft_tokens)
    phases = Phases(scheduler.placement, scheduler.headroom)
    progress = Progress()
    adapters = make_adapters(model, loaded, settings)
    started = tuple(adapters.load(Path(folder)) for _, folder in settings.lora)
    runner = make_runner(loaded, settings, kv, recorder, progress.note, adapters.loaded)
    grammars = Grammars(model, stack.vocab_size)
    activations = ActivationRoom(settings.max_activation_bytes)
    turns = Turns(scheduler, limit, grammars.match, activations)
    whitebox = Whitebox(scheduler.placement, runner, grammars.match, activations, stack.num_layers)
    mover = KVMover(kv.host, kv.identity, kv.disk)
    saved, refused = ({}, []) if kv.disk is None else kv.disk.index()
    transfers = Transfers(scheduler.placement, limit, saved, refused, mover.connections)
    handler = CommandHandler(
        scheduler, phases, turns, whitebox, transfers, adapters, text=loaded.text, steps=runner.counts
    )
    info = ModelInfo(
        name=model.name,
        max_model_len=limit,
        vocab_size=stack.vocab_size,
        num_layers=stack.num_layers,
        hidden_size=stack.hidden_size,
        kv_heads=layout.kv_heads,
        head_dim=stack.head_dim,
        dtype=dtype_name(stack.dtype),
        device=str(stack.device),
        parameter_bytes=stack.parameter_bytes,
        kv_bytes_per_token=layout.block_bytes * layout.groups.size // layout.block_size if layout.keeps_tokens else 0,
        kv_dtype=layout.dtype,
        state_bytes=layout.state_blocks * layout.block_bytes,
        adapters=started,
        points=runner.stack.points,
    )
    return Engine(info, scheduler, phases, runner, turns, handler, mover, kv.borrower, grammars, progress, loaded.close)


def make_adapters(model: ResolvedModel, loaded: LoadedModel, settings: EngineSettings) -> Adapters:
    """What loads LoRA adapters for a loaded model, and keeps them."""
    stack, sites = loaded.stack, f"lora: {model.config.model_type!r} runs on Transformers' modules, without adapters"
    products = choose_products(settings, model, stack.device, stack.dtype)
    make = linear_maker(stack.device, stack.dtype, batch_invariant=settings.batch_invariant, products=products)
    if loaded.ranks is not None:
        sites = "lora: adapters are for servers without tensor_parallel"
    found = stack.sites if isinstance(stack, OwnStack) and loaded.ranks is None else sites
    return Adapters(found, make, stack.device, settings.lora_bytes)


def make_scheduler(stack: LayerStack, settings: EngineSettings, kv: KV, draft_tokens: int) -> Scheduler:
    """The scheduler, with the placement that it plans with. A row has at most `draft_tokens` drafted tokens."""
    cache, borrower = kv.cache, kv.borrower
    tiers = KVTiers(cache, kv.identity.layout.block_bytes, stack.num_layers)
    borrow = borrower.borrow if borrower is not None else lambda missing: 0
    drafting = Drafting(
        cache,
        max_tokens=draft_tokens,
        num_layers=stack.num_layers,
        max_model_len=kv.max_model_len,
        exact_draws=stack.device.type == "cpu",
    )
    on_cpu = stack.device.type == "cpu"
    # A share of a step is left to prompts while there are other turns. On a CPU nearly all of a step's time goes with
    # its tokens. On a GPU the weights are read in each. Streamed weights are a sweep, whatever it computes.
    steps_shared = 1 if borrower is not None else 4 if on_cpu else 2
    # How many turns of one tenant decode in a step while others have turns: fewer than it may have, where each row
    # makes the step longer.
    rows_lengthen = on_cpu and borrower is None
    fairness = Fairness(
        prompt_tokens=-(-settings.max_step_tokens // steps_shared),
        rows=max(16, settings.max_step_tokens // 16) if rows_lengthen else settings.max_running,
        prompts_rest=rows_lengthen,  # elsewhere a step costs much without them too
    )
    return Scheduler(
        Placement(tiers, settings.kv_policy, kv.disk_blocks, time.monotonic, borrow),
        drafting,
        fairness,
        num_layers=stack.num_layers,
        max_step_tokens=settings.max_step_tokens,
        max_running=settings.max_running,
    )


def make_runner(
    loaded: LoadedModel,
    settings: EngineSettings,
    kv: KV,
    recorder: CudaRecorder | None,
    on_layer: Callable[[], None],
    adapters: Mapping[str, Additions],
) -> Runner:
    """What runs the steps of a loaded model. `on_layer` is called before each layer that may take long. `adapters` are
    those that are loaded.
    """
    stack, limit = loaded.stack, kv.max_model_len
    blocks = -(-limit // settings.block_size)
    graphs = None if recorder is None else record_graphs(stack, kv.pool, settings.max_running, blocks, recorder)
    run_layers = layer_by_layer(stack, kv.pool, on_layer)
    if loaded.ranks is not None:
        return Runner(
            LeadingStack(loaded.ranks, stack), kv.pool, loaded.streams, leading_layers(loaded.ranks, run_layers), graphs
        )
    if recorder is None and loaded.streams.on_host and loaded.streamed is None:  # what is streamed has no address
        from app.gpu.forward.programs import RecordedLayers  # imports Numba, which only a CPU needs

        run_layers = RecordedLayers(stack, kv.pool, limit, settings.max_step_tokens, on_layer)
    return Runner(stack, kv.pool, loaded.streams, run_layers, graphs, adapters)


@torch.inference_mode()
def warm_up(stack: LayerStack, block_size: int, kv_dtype: torch.dtype) -> None:
    """Run a decode row, alone and beside a prompt, through one layer of each kind, look at a pattern of attention, and
    mask logits: no client waits for kernels to be compiled, and the memory of loaded kernels is not counted as that of
    a step or a graph.
    """
    blocks = -(-WARM_UP_TOKENS // block_size)
    both = make_batch([(0, 1), (0, WARM_UP_TOKENS)], [[0], range(1, blocks + 1)], block_size, stack.device)
    pool = KVPool(stack, blocks + 1, block_size, dtype=kv_dtype)
    kinds = {type(state): index for index, state in reversed([*enumerate(stack.states)])}
    for batch in (both, make_batch([(0, 1)], [[0]], block_size, stack.device)):
        batch = with_new_states(stack, batch)
        hidden = stack.embed(torch.zeros_like(batch.positions), batch.positions)
        for index in kinds.values():
            hidden = stack.layer(index, hidden, batch, pool.layer(index))
        logits = stack.head(hidden)
    attending = next((i for i, shape in enumerate(stack.points.get(Point.PATTERN, ())) if shape is not None), None)
    if attending is not None:
        kv = pool.layer(attending)
        query = torch.zeros((1, kv.shape[2], stack.head_dim), device=stack.device)
        attention_pattern(query, kv, both.block_tables[0], [0], AttentionSpec(scale=1.0), [0])
    apply_mask(
        logits,
        torch.zeros(1, dtype=torch.int64, device=stack.device),
        torch.zeros((1, -(-stack.vocab_size // WORD)), dtype=torch.int32, device=stack.device),
    )


def choose_recorder(
    wanted: bool | None, device: torch.device, *, streamed: bool, folds: bool = False
) -> CudaRecorder | None:
    """None is yes where it can be. Raises FieldOutOfRange for graphs that are `wanted` where there can be none."""
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
def record_graphs(stack: LayerStack, pool: KVPool, rows: int, blocks: int, recorder: CudaRecorder) -> Graphs | None:
    """Record whole steps of up to `rows` rows, each of up to `blocks` KV blocks, for every bucket, the largest first,
    and check each. Writes to block 0 of `pool`, which must be free. None, and a warning, if that cannot be.
    """
    graphs = Graphs(stack, layer_by_layer(stack, pool), recorder, rows, blocks, pool.groups)
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
        step = _step(position, 1, pool, stack.device)
        expected = run_piece(stack, run_layers, 0, stages, *step)
    for bucket in graphs.buckets:
        rows = max(1, bucket - 1)
        found = graphs.replay_whole(*_step(CHECKED_TOKENS - 1, rows, pool, stack.device))
        error = float(((found - expected).norm(dim=-1) / expected.norm()).max())
        if not error < TOLERANCE[stack.dtype]:
            raise RuntimeError(f"logits of a batch of {rows} are off by {error:.0%} when they are replayed")


def _step(position: int, rows: int, pool: KVPool, device: torch.device) -> tuple[Tensor, Batch]:
    """Token `position` of `rows` times one sequence, whose token ids are its positions and whose KV is in block 0."""
    blocks = [0] * (position // pool.block_size + 1) * pool.groups
    batch = make_batch([(position, 1)] * rows, [blocks] * rows, pool.block_size, device, pool.groups)
    return batch.positions.clone(), batch
