"""Attention over the paged pool of keys and values: which kernels a device has."""

import sys

import torch

from app.gpu.kernels.attention.base import Attention


def attention_for(device: torch.device, *, batch_invariant: bool = False, in_bfloat16: bool = False) -> Attention:
    """The fastest attention for `device`, a CPU or a CUDA device. With `batch_invariant` no token's result depends on
    other tokens of its batch, nor on how its prompt is cut. With `in_bfloat16` a CPU multiplies prompts in bfloat16.
    """
    if device.type == "cuda":
        from app.gpu.kernels.attention.cuda import CudaAttention  # imports Triton, which only a GPU needs

        return CudaAttention(batch_invariant=batch_invariant)
    from app.gpu.kernels.attention.cpu import PagedCpuAttention  # imports Numba, which only a CPU needs

    return PagedCpuAttention(batch_invariant=batch_invariant, in_bfloat16=in_bfloat16)


def tokens_alike(device: torch.device, *, batch_invariant: bool) -> int:
    """The longest row whose tokens each get the bits that they would get alone, from `attention_for` the same."""
    if batch_invariant:
        return sys.maxsize
    if device.type != "cpu":
        return 1
    from app.gpu.kernels.attention.cpu import PAGED_TOKENS

    return PAGED_TOKENS
