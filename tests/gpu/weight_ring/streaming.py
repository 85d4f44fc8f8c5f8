"""Tiny models of which the device holds a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from app.gpu.attention import attention_named
from app.gpu.startup.weights import load_model
from app.settings import Settings
from tests.gpu.breakpoints.breaking_models import TinyModel

CPU = torch.device("cpu")


@contextmanager
def streaming(model: TinyModel, folder: Path, share: float) -> Iterator[TinyModel]:
    """The same model with room on the device for a `share` of its parameters; its files are kept in `folder`."""
    settings = Settings(weights_device=int(model.stack.parameter_bytes * share), cache_dir=folder)
    loaded = load_model(model.resolved, settings.engine(), CPU, torch.float32, attention_named("cpu"))
    assert loaded.streamed is not None
    try:
        yield replace(model, stack=loaded.stack, streams=loaded.streams, streamed=loaded.streamed)
    finally:
        loaded.close()
