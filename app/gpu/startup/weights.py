"""Where a model's weights go: all of them onto the device, or a part, with the others streamed from the host."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from app.domain.memory_map import TextUse
from app.gpu.device.choice import streams_of
from app.gpu.device.memory import allocating, zeroed
from app.gpu.device.streams import DeviceStreams
from app.gpu.kernels.attention.base import Attention
from app.gpu.kernels.linear import linear_maker
from app.gpu.kernels.linear.base import MakeLinear
from app.gpu.kernels.linear.shard import WHOLE, Shard
from app.gpu.models import build_stack, can_be_streamed, load_stack, require_row_by_row
from app.gpu.models.base import LayerStack
from app.gpu.ranks.leader import Ranks
from app.gpu.startup.budgets import check_weights_fit, free_bytes, weight_bytes
from app.gpu.startup.host_copy import make_host_copy
from app.gpu.startup.products import choose_products
from app.gpu.startup.survey import MetaWeights, survey
from app.gpu.startup.weights_dtype import require_weights_dtype
from app.gpu.weights.arena import Arena, lay_out
from app.gpu.weights.form import Form
from app.gpu.weights.residency import WeightPlan, plan_weights
from app.gpu.weights.source import weights_of
from app.gpu.weights.streamed import StreamedText
from app.machine.units import size
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
        return TextUse(total, total) if self.streamed is None else self.streamed.text.use(total)

    def close(self) -> None:
        """End the threads and streams that move weights, and the processes of other ranks."""
        if self.streamed is not None:
            self.streamed.text.close()
        if self.ranks is not None:
            self.ranks.close()


@dataclass(frozen=True, slots=True)
class Streamed:
    """Weights that are streamed to the device, and their plan. `share` moves them beside KV."""

    text: StreamedText
    plan: WeightPlan

    def share(self, kv_blocks: int, block_bytes: int) -> tuple[Arena, Tensor]:
        """Move into memory that begins with so many blocks of KV. Returns its layout and the memory itself, uint8.

        Raises FieldOutOfRange if there is too little, `WeightsLost`.
        """
        arena = lay_out(self.plan, kv_blocks, block_bytes)
        self.text.vacate()
        larger = "kv_device" if kv_blocks * block_bytes > self.plan.device_bytes else "weights_device"
        with allocating(larger, arena.nbytes):
            memory = zeroed((arena.nbytes,), torch.uint8, self.text.device)
        self.text.place(memory, arena.places, arena.ring)
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
    free = free_bytes(device)
    needed = _needed_bytes(model, settings, device, dtype, attention, free)
    budget = settings.weights_device
    if budget is None:
        fits = needed <= free * RESIDENT_SHARE or not can_be_streamed(model)
        budget = needed if fits else int(free * STREAMED_SHARE)
    check_weights_fit(model, min(needed, budget), device, dtype)
    if needed > budget:
        return _stream(model, settings, budget, device, dtype, attention)
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


def _needed_bytes(
    model: ResolvedModel,
    settings: EngineSettings,
    device: torch.device,
    dtype: torch.dtype,
    attention: Attention,
    free: int,
) -> int:
    """Bytes of all weights on the device. Where blocks are laid out anew, or become float32, that may be many times
    what they take in their file. To find out takes a second, so a small model is counted by its file.
    """
    stored = weight_bytes(model, device, dtype)
    form = Form(device, dtype, model.weights_dtype)
    if stored * MOST_GROWTH < free or not (form.keeps_matrices and can_be_streamed(model)) or model.folder is None:
        return stored
    linear = _streamed_linear(model, settings, device, dtype)
    found = survey(model, dtype, linear, attention, settings.max_model_len)
    return sum(layout.nbytes for layout in found.layouts) + sum(table.nbytes for table in found.tables)


def _stream(
    model: ResolvedModel,
    settings: EngineSettings,
    budget: int,
    device: torch.device,
    dtype: torch.dtype,
    attention: Attention,
) -> LoadedModel:
    """Keep as many bundles as `budget` bytes allow. Settings that do not fit are refused before a weight is read."""
    if settings.batch_invariant:
        require_row_by_row(model, device)
    linear = _streamed_linear(model, settings, device, dtype)
    found = survey(model, dtype, linear, attention, settings.max_model_len)
    plan = plan_weights([layout.nbytes for layout in found.layouts], budget, from_disk=device.type == "cpu")
    streams = streams_of(device)
    store = make_host_copy(model, found, settings, device, dtype, linear, attention, streams)
    text = StreamedText(device, dtype, found.layouts, store, streams, linear)
    loaded = Streamed(text, plan)
    try:
        shapes = MetaWeights(weights_of(model, torch.device("cpu"), dtype), dtype)
        stack = build_stack(model, shapes, text, attention, settings.max_model_len)
        loaded.share(0, 1)
    except BaseException:
        text.close()
        raise
    _log_plan(plan)
    return LoadedModel(stack, streams, loaded)


def _streamed_linear(
    model: ResolvedModel, settings: EngineSettings, device: torch.device, dtype: torch.dtype
) -> MakeLinear:
    products = choose_products(settings, model, device, dtype)
    return linear_maker(device, dtype, streamed=True, batch_invariant=settings.batch_invariant, products=products)


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
