"""Where a model's weights go: all of them onto the device, or a part, with the others streamed from the host."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from app.domain.memory_map import TextUse
from app.gpu.device.choice import dtype_name
from app.gpu.device.memory import allocating, zeroed
from app.gpu.device.streams import DeviceStreams, streams_of
from app.gpu.kernels.attention.base import Attention
from app.gpu.kernels.linear import linear_maker
from app.gpu.kernels.linear.shard import WHOLE, Shard
from app.gpu.models import build_stack, can_be_streamed, load_stack, require_row_by_row
from app.gpu.models.base import LayerStack
from app.gpu.ranks.leader import Ranks
from app.gpu.startup.memory import check_weights_fit, free_bytes, weight_bytes
from app.gpu.startup.precision import choose_products, require_weights_dtype
from app.gpu.weights.arena import Arena, WeightPlan, lay_out, plan_weights
from app.gpu.weights.file import open_weight_file
from app.gpu.weights.layout import Write
from app.gpu.weights.ring import StreamedWeights
from app.gpu.weights.source import TensorFormat, weights_of
from app.gpu.weights.stores import BundleStore, FileStore, PinnedStore
from app.machine.units import size
from app.model_store.fingerprint import fingerprint
from app.model_store.resolve import ResolvedModel
from app.settings import EngineSettings

logger = logging.getLogger(__name__)

MOST_GROWTH = 16
"""More times the bytes of a file than any type of its blocks takes in memory: those of 2 bits become float32."""
RESIDENT_SHARE = 0.9
"""Most of the free memory that all weights may take by default: KV and steps need some."""
STREAMED_SHARE = 0.5
"""Default share of the free memory of a device that cannot keep all weights: the rest is for KV and steps."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that runs."""

    stack: LayerStack
    streams: DeviceStreams
    """Streams of its device."""
    streamed: Streamed | None = None
    """None: all weights are on the device, and stay there."""
    ranks: Ranks | None = None
    """Other processes that have parts of its layers; None: all of them are here."""

    def text(self) -> TextUse:
        """Memory that the weights take now."""
        total = self.stack.parameter_bytes
        return TextUse(total, total) if self.streamed is None else self.streamed.weights.use(total)

    def close(self) -> None:
        """End the threads and streams that move weights, and the processes of other ranks."""
        if self.streamed is not None:
            self.streamed.weights.close()
        if self.ranks is not None:
            self.ranks.close()


@dataclass(frozen=True, slots=True)
class Streamed:
    """Weights that are streamed to the device, and their plan. `share` moves them beside KV."""

    weights: StreamedWeights
    plan: WeightPlan

    def share(self, kv_blocks: int, block_bytes: int) -> tuple[Arena, Tensor]:
        """Move into memory that begins with so many blocks of KV. Returns its layout and the memory itself, uint8.

        Raises FieldOutOfRange if there is too little, `WeightsLost`.
        """
        arena = lay_out(self.plan, kv_blocks, block_bytes)
        self.weights.vacate()
        larger = "kv_device" if kv_blocks * block_bytes > self.plan.device_bytes else "weights_device"
        with allocating(larger, arena.nbytes):
            memory = zeroed((arena.nbytes,), torch.uint8, self.weights.device)
        self.weights.place(memory, arena.places, arena.ring)
        return arena, memory


def load_model(
    model: ResolvedModel,
    settings: EngineSettings,
    device: torch.device,
    dtype: torch.dtype,
    attention: Attention,
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Load the weights as `settings.weights_device` says, or rank 0's part of them. Takes seconds; raises
    FieldOutOfRange if they do not fit or cannot be kept as the model says, BrokenModel and `WeightsLost` if they cannot
    be read.
    """
    require_weights_dtype(model, device, dtype)
    if ranks is not None:
        return _load_part(model, settings, device, dtype, attention, ranks)
    stored, free = weight_bytes(model, device, dtype), free_bytes(device)
    # Blocks that are laid out anew, or become float32, may take many times what they take in their file. To find out
    # takes a second, so a small model is counted by its file.
    may_grow = TensorFormat(device, dtype, model.weights_dtype).keeps_matrices and model.folder is not None
    built = None
    if may_grow and stored * MOST_GROWTH >= free and can_be_streamed(model):
        built = _build_on_meta(model, settings, device, dtype, attention)
    needed = stored if built is None else built[0].layout.nbytes
    budget = settings.weights_device
    if budget is None:
        fits = needed <= free * RESIDENT_SHARE or not can_be_streamed(model)
        budget = needed if fits else int(free * STREAMED_SHARE)
    check_weights_fit(model, min(needed, budget), device, dtype)
    if needed > budget:
        if settings.batch_invariant:
            require_row_by_row(model, device)
        weights, stack = built or _build_on_meta(model, settings, device, dtype, attention)
        return _stream(model, settings, budget, weights, stack, attention)
    stack = _load(model, settings, device, dtype, attention)
    twice = max(0, needed - stack.parameter_bytes)
    copy = f", and {size(twice)} more: the tied output projection, in another layout" if twice else ""
    logger.info("weights: all of them, %s, stay on the device%s", size(stack.parameter_bytes), copy)
    return LoadedModel(stack, streams_of(device))


def _load_part(
    model: ResolvedModel,
    settings: EngineSettings,
    device: torch.device,
    dtype: torch.dtype,
    attention: Attention,
    ranks: Ranks,
) -> LoadedModel:
    """Rank 0's: its shard of layers and head, and the embedding, while the others load theirs."""
    needed = weight_bytes(model, device, dtype)
    check_weights_fit(model, needed if device.type == "cpu" else needed // ranks.count, device, dtype)
    stack = _load(model, settings, device, dtype, attention, ranks.shard)
    logger.info("weights: %s, the layers cut over %d ranks", size(stack.parameter_bytes), ranks.count)
    return LoadedModel(stack, streams_of(device), ranks=ranks)


def _load(
    model: ResolvedModel,
    settings: EngineSettings,
    device: torch.device,
    dtype: torch.dtype,
    attention: Attention,
    shard: Shard = WHOLE,
) -> LayerStack:
    """The layers with their weights on the device."""
    return load_stack(
        model,
        device=device,
        dtype=dtype,
        attention=attention,
        max_model_len=settings.max_model_len,
        batch_invariant=settings.batch_invariant,
        products=choose_products(settings, model, device, dtype),
        shard=shard,
    )


def _build_on_meta(
    model: ResolvedModel, settings: EngineSettings, device: torch.device, dtype: torch.dtype, attention: Attention
) -> tuple[StreamedWeights, LayerStack]:
    """The layers without a weight, and how their weights are laid out where they are streamed."""
    products = choose_products(settings, model, device, dtype)
    linear = linear_maker(device, dtype, batch_invariant=settings.batch_invariant, products=products)
    weights = StreamedWeights(device, dtype, linear)
    shapes = weights_of(model, torch.device("cpu"), dtype, on_meta=True)
    return weights, build_stack(model, shapes, weights, attention, settings.max_model_len)


def _stream(
    model: ResolvedModel,
    settings: EngineSettings,
    budget: int,
    weights: StreamedWeights,
    stack: LayerStack,
    attention: Attention,
) -> LoadedModel:
    """Keep as many bundles as `budget` bytes allow. Settings that do not fit are refused before a weight is read."""
    device, dtype, layout = weights.device, weights.dtype, weights.layout
    plan = plan_weights([bundle.nbytes for bundle in layout.bundles], budget, from_disk=device.type == "cpu")
    # Random weights are made where that is fast; stored ones are on the host to begin with.
    origin = device if model.folder is None else torch.device("cpu")

    def fill(write: Write) -> None:
        parts = StreamedWeights(torch.device("meta"), dtype, weights.make_linear, write)
        build_stack(model, weights_of(model, origin, dtype), parts, attention, settings.max_model_len)

    streams = streams_of(device)
    store: BundleStore
    if device.type == "cpu":  # the device is host memory itself
        known = fingerprint(model)
        path = settings.weights_dir / f"{Path(model.name).name}-{known[:16]}-{dtype_name(dtype)}.safetensors"
        file = open_weight_file(path, f"{known} in {dtype_name(dtype)}", layout, fill)
        store = FileStore(file, settings.chunk_bytes)
    else:
        store = PinnedStore(layout, streams, settings.chunk_bytes)
        fill(store.write)
    weights.stream_from(store, streams)
    loaded = Streamed(weights, plan)
    try:
        loaded.share(0, 1)
    except BaseException:
        weights.close()
        raise
    _log_plan(plan)
    return LoadedModel(stack, streams, loaded)


def _log_plan(plan: WeightPlan) -> None:
    logger.info(
        "weights: %d of %d bundles stay on the device, %s; the others, %s, pass through a ring of %s each step. A "
        "prompt of up to max_step_tokens tokens takes one step",
        len(plan.kept),
        len(plan.sizes),
        size(plan.kept_bytes),
        size(plan.streamed_bytes),
        size(plan.ring_bytes),
    )
