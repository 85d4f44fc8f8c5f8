"""Engines as `djinn serve` makes them, for a stage."""

from pathlib import Path

import torch

from app.gpu.attention import attention_for
from app.gpu.device.choice import choose_device, choose_dtype, streams_of
from app.gpu.engine import Engine
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.startup.loader import build_engine, load_engine
from app.gpu.startup.weights import LoadedModel
from app.model_store.resolve import ResolvedModel, resolve
from app.settings import Settings
from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.live import LiveEngine
from benchmarks.gpu_check.profile import traced

FEW = 4
"""Most sessions in one step where no more take part: an engine prepares for as many as it is told when it is loaded."""


def make_settings(device: str, model: str, **changed: object) -> Settings:
    """The server's defaults but for `changed`, and without a state folder."""
    return Settings.model_validate({"model": model, "device": device, "state_dir": None, **changed})


def find_model(name: str) -> ResolvedModel:
    """A model with random weights, which needs no cache."""
    return resolve(name, cache_dir=Path())


def load(context: StageContext, model: str, **changed: object) -> LiveEngine:
    """Load a model and put an engine around it. Raises `DjinnError` if the machine has no room for it."""
    settings = make_settings(context.plan.device, model, **changed)
    return live(context, load_engine(find_model(model), settings.engine()))


def load_layers(context: StageContext, model: str) -> LayerStack:
    """The model alone, for stages that build several engines around it."""
    device = choose_device(context.plan.device)
    return load_stack(
        find_model(model), device=device, dtype=choose_dtype("auto", device), attention=attention_for(device)
    )


def build(context: StageContext, model: str, stack: LayerStack, **changed: object) -> LiveEngine:
    """An engine around a loaded model."""
    settings = make_settings(context.plan.device, model, **changed)
    return live(
        context, build_engine(find_model(model), LoadedModel(stack, streams_of(stack.device)), settings.engine())
    )


def live(context: StageContext, engine: Engine) -> LiveEngine:
    """The engine, traced if the context asks for it."""
    return LiveEngine(engine, None if context.trace is None else traced(context.trace, context.plan.device))


def synchronize(device: str) -> None:
    """Wait for all that the device has been given to do."""
    if device == "cuda":
        torch.cuda.synchronize()
