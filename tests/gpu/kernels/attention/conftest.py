"""PyTorch's flash attention, which has kernels for CUDA only, as an operator for CPU tensors too: prompts in half
precision run where Triton is interpreted.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

Returned = tuple[Tensor, Tensor, Tensor, Tensor, int, int, Tensor, Tensor, Tensor]


@pytest.fixture(scope="session", autouse=True)
def _flash_on_cpu() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl(torch.ops.aten._scaled_dot_product_flash_attention.default, _flash_attention, "CPU")
    yield
    del library


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Returned:
    """Causal attention as the operator does it, and refuses it, on CUDA (`mha_fwd` in PyTorch's `flash_api.cpp`)."""
    assert is_causal
    assert not dropout_p
    assert not return_debug_mask
    heads, length, head_dim = query.shape[1:]
    kv_heads, context, _ = key.shape[1:]
    assert heads % kv_heads == 0
    assert head_dim % 8 == 0
    assert head_dim <= 256
    for x in (query, key, value):
        assert x.dtype in (torch.float16, torch.bfloat16)
        assert x.stride(3) == 1
        assert x.storage_offset() % 8 == x.stride(1) % 8 == x.stride(2) % 8 == 0  # its loads are of 16 bytes
    seen = torch.ones(length, context, dtype=torch.bool).tril(context - length)
    attended = F.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), attn_mask=seen, scale=scale, enable_gqa=True
    )
    none = query.new_empty(0)
    return attended.to(query.dtype), none, none, none, length, context, none, none, none
