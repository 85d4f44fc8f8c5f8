"""The attention backends, by name. A backend's module is imported only when it is chosen."""

import sys
from importlib import import_module
from typing import cast

import torch

from app.domain.errors import FieldOutOfRange
from app.gpu.kernels.attention.base import Attention

_BACKENDS = {
    "reference": "app.gpu.kernels.attention.reference:ReferenceAttention",
    "cpu": "app.gpu.kernels.attention.cpu:PagedCpuAttention",
    "cpu-bfloat16": "app.gpu.kernels.attention.cpu:bfloat16_attention",
    "cpu-batch-invariant": "app.gpu.kernels.attention.cpu:batch_invariant_attention",
    "cuda": "app.gpu.kernels.attention.cuda:CudaAttention",
    "cuda-batch-invariant": "app.gpu.kernels.attention.cuda:batch_invariant_attention",
}


def attention_named(name: str) -> Attention:
    """The backend `name`; `FieldOutOfRange` lists the names that there are."""
    if name not in _BACKENDS:
        raise FieldOutOfRange(f"attention must be one of {', '.join(_BACKENDS)}; got {name!r}", param="attention")
    module, _, attribute = _BACKENDS[name].partition(":")
    return cast("Attention", getattr(import_module(module), attribute)())


def attention_for(device: torch.device, *, batch_invariant: bool = False, in_bfloat16: bool = False) -> Attention:
    """The fastest backend for `device`; one without a backend of its own runs the reference.

    With `in_bfloat16` the prompts of a CPU that computes in float32 are multiplied in bfloat16. With `batch_invariant`
    it is one under which no token's result depends on the others of its batch, nor on how its prompt is cut into
    chunks: all is float32.
    """
    wish = "batch-invariant" if batch_invariant else "bfloat16" if in_bfloat16 else ""
    names = f"{device.type}-{wish}", device.type, "reference"
    return attention_named(next(each for each in names if each in _BACKENDS))


def tokens_alike(device: torch.device, *, batch_invariant: bool) -> int:
    """The longest row whose tokens each get the bits that they would get alone, from `attention_for` the same."""
    if batch_invariant and f"{device.type}-batch-invariant" in _BACKENDS:
        return sys.maxsize
    if device.type != "cpu":
        return 1
    from app.gpu.kernels.attention.cpu import PAGED_TOKENS  # imports Numba, which only a CPU needs

    return PAGED_TOKENS
