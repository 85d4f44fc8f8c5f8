"""A model several times larger than the device may hold: as large as host memory and time allow."""

import time

import torch

from app.gpu.device.hardware import choose_device, choose_dtype
from app.gpu.device.streams import streams_of
from app.gpu.kernels.attention import attention_for
from app.gpu.kernels.linear import DenseLinear
from app.gpu.models import build_stack
from app.gpu.weights.bundles import StreamedWeights
from app.gpu.weights.checkpoint import weights_of
from app.machine.memory import read_host_memory
from app.model_store.resolve import ResolvedModel
from benchmarks.engine.loading import find_model
from benchmarks.gpu_check.context import SkipStage, StageContext
from benchmarks.gpu_check.plan import StreamPlan

CPU = torch.device("cpu")
MAKING_SHARE = 0.4
"""Of the stage's time, for making the weights and their copy in host memory."""
MEMORY_SHARE = 0.85
"""Of the free host memory, for that copy."""
PROBE_BYTES = 1 << 30
FEWEST_LAYERS = 3


def make_large_model(context: StageContext) -> ResolvedModel:
    """A model of the planned shape, with as many of its layers as can be made; the record says how many.

    Raises `SkipStage` if that is hardly any.
    """
    plan = context.plan.streaming
    layer = _bytes_of(plan, 2) - _bytes_of(plan, 1)
    others = _bytes_of(plan, 1) - layer
    layers = layers_that_fit(plan.layers, layer, others, _room(context))
    if layers < min(FEWEST_LAYERS, plan.layers):
        raise SkipStage(f"neither memory nor time allow {FEWEST_LAYERS} layers of {layer / 1e9:.1f} GB")
    total = others + layers * layer
    context.journal.fact("model that is streamed", f"{plan.model} with {layers} layers, {total / 1e9:.2f} GB")
    if layers < plan.layers:
        planned = others + plan.layers * layer
        context.journal.note(f"Neither memory nor time allowed the {planned / 1e9:.0f} GB that were planned.")
    return with_layers(plan.model, layers)


def with_layers(name: str, layers: int) -> ResolvedModel:
    """A model with random weights that is lower, or higher, than its shape has it."""
    model = find_model(name)
    model.config.num_hidden_layers = layers
    return model


def layers_that_fit(planned: int, layer_bytes: int, other_bytes: int, room_bytes: float) -> int:
    """How many of the planned layers fit in the room beside what is no layer. Pure."""
    return max(0, min(planned, int((room_bytes - other_bytes) / layer_bytes)))


def _bytes_of(plan: StreamPlan, layers: int) -> int:
    model, weights = with_layers(plan.model, layers), StreamedWeights(CPU, torch.float32, DenseLinear)
    build_stack(model, weights_of(model, CPU, torch.float32, on_meta=True), weights, attention_for(CPU), None)
    return weights.layout.nbytes // torch.float32.itemsize * plan.element_bytes


def _room(context: StageContext) -> float:
    """Bytes of weights that host memory has room for, and that can be made in the time there is."""
    room = MEMORY_SHARE * read_host_memory().free_bytes
    if context.device == "cpu":
        return room
    return min(room, MAKING_SHARE * context.left_s * _bytes_made_per_s(context.device))


def _bytes_made_per_s(device: str) -> float:
    """How fast random weights are made on the device and copied to host memory that is pinned for them."""
    found = choose_device(device)
    streams = streams_of(found)
    weights = torch.empty(PROBE_BYTES // 2, dtype=choose_dtype("auto", found), device=found)
    torch.cuda.synchronize()
    began = time.perf_counter()
    slab = streams.host_slab((PROBE_BYTES,))
    slab.copy_(weights.normal_().view(torch.uint8))
    return PROBE_BYTES / (time.perf_counter() - began)
