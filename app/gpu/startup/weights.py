"""Where a model's weights go: all of them onto the device, or a part, with the others streamed from the host."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from app.domain.errors import FieldOutOfRange
from app.domain.memory_map import TextUse
from app.gpu.device.hardware import dtype_name
from app.gpu.device.streams import DeviceStreams, streams_of
from app.gpu.kernels.linear import linear_maker
from app.gpu.models import can_be_streamed, require_row_by_row
from app.gpu.models.base import LayerStack
from app.gpu.models.recipe import Recipe
from app.gpu.ranks.leader import Ranks
from app.gpu.weights.arena import plan_weights
from app.gpu.weights.bundles import StreamedWeights
from app.gpu.weights.checkpoint import require_known, weights_of
from app.gpu.weights.file import open_weight_file
from app.gpu.weights.layout import WeightLayout, Write
from app.gpu.weights.stores import BundleStore, FileStore, PinnedStore
from app.machine.files import size
from app.machine.memory import read_host_memory
from app.model_store.install import BrokenModel
from app.model_store.resolve import ResolvedModel, fingerprint
from app.model_store.tensors import is_indexed, stored_shapes

logger = logging.getLogger(__name__)

QUANTIZED = "quantization_config"
"""The field of a config that has it."""
_EXPERT, _EXPERT_COUNTS = re.compile(r"\.experts\.(\d+)?"), ("num_experts", "num_local_experts", "n_routed_experts")
"""In the name of an expert's tensor, or of one with all experts; and fields of configs that count those of a layer."""
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
    streamed: StreamedWeights | None = None
    """None: all weights are on the device, and stay there."""
    ranks: Ranks | None = None
    """Other processes that have parts of its layers; None: all of them are here."""

    def text(self) -> TextUse:
        """Memory that the weights take now."""
        total = self.stack.parameter_bytes
        return TextUse(total, total) if self.streamed is None else self.streamed.use(total)

    def close(self) -> None:
        """End the threads and streams that move weights, and the processes of other ranks."""
        if self.streamed is not None:
            self.streamed.close()
        if self.ranks is not None:
            self.ranks.close()


def load_model(recipe: Recipe, ranks: Ranks | None = None) -> LoadedModel:
    """Load the weights as `settings.weights_device` says, or rank 0's part of them while the others load theirs. Takes
    seconds; raises FieldOutOfRange if they do not fit, BrokenModel and `WeightsLost` if they cannot be read.
    """
    model, settings, device, dtype = recipe.model, recipe.settings, recipe.device, recipe.dtype
    require_fitting(model)
    # A tensor that is missing, or has another shape, is found before a weight is read.
    built = _build_on_meta(recipe) if can_be_streamed(model) else None
    needed = weight_bytes(model, dtype) if built is None else _resident_bytes(recipe, built[0].layout)
    if ranks is not None:
        _check_fit(model, needed if device.type == "cpu" else needed // ranks.count, device, dtype)
        stack = recipe.load_stack(ranks.shard)
        logger.info("weights: %s, the layers cut over %d ranks", size(stack.parameter_bytes), ranks.count)
        return LoadedModel(stack, streams_of(device), ranks=ranks)
    free, budget = free_bytes(device), settings.weights_device
    if budget is None:
        fits = needed <= free * RESIDENT_SHARE or built is None
        budget = needed if fits else int(free * STREAMED_SHARE)
    _check_fit(model, min(needed, budget), device, dtype)
    if needed > budget:
        if settings.batch_invariant:
            require_row_by_row(model, device)
        return _stream(recipe, budget, *(built or _build_on_meta(recipe)))
    stack = recipe.load_stack()
    twice = max(0, needed - stack.parameter_bytes) if model.config.get_text_config().tie_word_embeddings else 0
    copy = f", and {size(twice)} more: the tied output projection, in another layout" if twice else ""
    logger.info("weights: all of them, %s, stay on the device%s", size(stack.parameter_bytes), copy)
    return LoadedModel(stack, streams_of(device))


def require_fitting(model: ResolvedModel) -> None:
    """Raise BrokenModel, in a sentence that names file and field, for a folder whose quantization Djinn does not read,
    or that has not as many experts as its config says. Only names of tensors are read.
    """
    if model.folder is None or is_indexed(model.folder):
        return
    quantization, text = getattr(model.config, QUANTIZED, None), model.config.get_text_config()
    if quantization is not None:
        require_known(model.folder, quantization)
    fields = text.to_dict()  # under the names of config.json: some have attributes of other names too
    counts = [0]
    for stored, shape in stored_shapes(model.folder).items():
        found = _EXPERT.search(stored)
        if found and found[1] is not None:
            counts.append(int(found[1]) + 1)
        elif found and len(shape) > 2:
            counts.append(shape[0])
    for name in _EXPERT_COUNTS if max(counts) else ():
        said = fields.get(name)
        if isinstance(said, int) and said != max(counts):
            raise BrokenModel(
                f"{model.folder / 'config.json'}: {name} is {said}, and the weights have {max(counts)} experts",
                param="model",
            )


def needed_bytes(recipe: Recipe) -> int:
    """Bytes that all weights take on the device. Nothing is read but the sizes of tensors; raises as `load_model`."""
    if can_be_streamed(recipe.model):
        return _resident_bytes(recipe, _build_on_meta(recipe)[0].layout)
    return weight_bytes(recipe.model, recipe.dtype)


def _resident_bytes(recipe: Recipe, layout: WeightLayout) -> int:
    """Bytes of all weights that are laid out so. A GPU multiplies by a tied embedding, the first table, where it is."""
    tied = bool(recipe.model.config.get_text_config().tie_word_embeddings) and recipe.device.type == "cuda"
    return layout.nbytes - (layout.tables[0].nbytes if tied else 0)


def _build_on_meta(recipe: Recipe) -> tuple[StreamedWeights, LayerStack]:
    """The layers without a weight, and how their weights are laid out where they are streamed."""
    device, dtype = recipe.device, recipe.dtype
    linear = linear_maker(device, dtype, batch_invariant=recipe.settings.batch_invariant, products=recipe.products)
    weights = StreamedWeights(device, dtype, linear)
    on_gpu, host = device.type == "cuda", torch.device("cpu")
    source = weights_of(recipe.model, host, dtype, on_meta=True, on_gpu=on_gpu)
    return weights, recipe.build_stack(source, weights)


def _stream(recipe: Recipe, budget: int, weights: StreamedWeights, stack: LayerStack) -> LoadedModel:
    """Keep as many bundles as `budget` bytes allow. Settings that do not fit are refused before a weight is read."""
    model, settings, device, dtype, layout = recipe.model, recipe.settings, recipe.device, recipe.dtype, weights.layout
    plan = plan_weights([bundle.nbytes for bundle in layout.bundles], budget, from_disk=device.type == "cpu")
    # Random weights are made where that is fast; stored ones are on the host to begin with.
    origin = device if model.folder is None else torch.device("cpu")

    def fill(write: Write) -> None:
        parts = StreamedWeights(torch.device("meta"), dtype, weights.make_linear, write)
        recipe.build_stack(weights_of(model, origin, dtype, on_gpu=device.type == "cuda"), parts)

    streams = streams_of(device)
    store: BundleStore
    if device.type == "cpu":  # the device is host memory itself
        known = fingerprint(model)
        path = settings.weights_dir / f"{Path(model.name).name}-{known[:16]}-{dtype_name(dtype)}.safetensors"
        file = open_weight_file(path, f"{known} in {dtype_name(dtype)}", layout, fill)
        store = FileStore(file, weights.sparse)
    else:
        store = PinnedStore(layout, streams, settings.chunk_bytes)
        fill(store.write)
    weights.stream_from(store, streams, plan)
    try:
        weights.share(0, 1)
    except BaseException:
        weights.close()
        raise
    logger.info(
        "weights: %d of %d bundles stay on the device, %s; the others, %s, pass through a ring of %s each step. A "
        "prompt of up to max_step_tokens tokens takes one step",
        len(plan.kept),
        len(plan.sizes),
        size(plan.kept_bytes),
        size(plan.streamed_bytes),
        size(plan.ring_bytes),
    )
    return LoadedModel(stack, streams, weights)


def weight_bytes(model: ResolvedModel, dtype: torch.dtype) -> int:
    """Bytes of all parameters as `dtype`, as Transformers' modules have them."""
    if model.folder is not None and getattr(model.config, QUANTIZED, None) is None:
        return sum(map(prod, stored_shapes(model.folder).values())) * dtype.itemsize
    from transformers import AutoModelForCausalLM  # imports much of Transformers

    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(model.config).parameters()
    count: int = sum(each.numel() for each in parameters)
    return count * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Of the device's memory, now."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_host_memory().free_bytes


def _check_fit(model: ResolvedModel, needed: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `FieldOutOfRange` if fewer than `needed` bytes are free on `device`, where these weights are kept."""
    free = free_bytes(device)
    if needed > free:
        raise FieldOutOfRange(
            f"the weights of {model.name} need {size(needed)} for {dtype_name(dtype)}; "
            f"{size(free)} are free on {device}. Llama-like models and GPT-2 need less: see weights_device",
            param="weights_device",
        )
