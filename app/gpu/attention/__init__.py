"""The attention backends, by name. A backend's module is imported only when it is chosen."""

from __future__ import annotations

from importlib import import_module
from typing import cast

import torch

from app.errors import FieldOutOfRange
from app.gpu.attention.base import Attention

_BACKENDS = {
    "reference": "app.gpu.attention.reference:ReferenceAttention",
    "cpu": "app.gpu.attention.cpu:PagedCpuAttention",
}
_FASTEST = {"cpu": "cpu"}


def attention_named(name: str) -> Attention:
    """The backend `name`; `FieldOutOfRange` lists the names that there are."""
    if name not in _BACKENDS:
        raise FieldOutOfRange(f"attention must be one of {', '.join(_BACKENDS)}; got {name!r}", param="attention")
    module, _, attribute = _BACKENDS[name].partition(":")
    return cast("Attention", getattr(import_module(module), attribute)())


def attention_for(device: torch.device) -> Attention:
    """The fastest backend for `device`; one without a backend of its own runs the reference."""
    return attention_named(_FASTEST.get(device.type, "reference"))
