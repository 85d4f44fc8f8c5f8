"""PyTorch's flash attention, which has kernels for CUDA only, as an operator for CPU tensors too: prompts in half
precision run where Triton is interpreted.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

Returned = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(scope="session", autouse=True)
def _flash_on_cpu() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl(torch.ops.aten._flash_attention_forward.default, _flash_attention, "CPU")
    yield
    del library


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    most_keys: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> Returned:
    """Packed sequences as the operator takes them, and refuses them, on CUDA (`mha_varlen_fwd` in PyTorch's
    `flash_api.cpp`).
    """
    assert (is_causal, dropout_p, return_debug_mask, window_size_right) == (True, 0.0, False, 0)
    assert query.shape[1] % key.shape[1] == query.shape[2] % 8 == 0
    assert query.shape[2] <= 256
    for x in (query, key, value):
        assert x.dtype in (torch.float16, torch.bfloat16)
        assert x.stride(2) == 1
        assert x.storage_offset() % 8 == x.stride(0) % 8 == x.stride(1) % 8 == 0  # its loads are of 16 bytes
    for x in (starts, key_starts):
        assert (x.dtype, x.is_contiguous()) == (torch.int32, True)
    assert torch.equal(starts, key_starts)
    lengths = starts.diff().tolist()
    assert (sum(lengths), max(lengths), most_keys) == (len(query), longest, longest)
    parts = []
    split = ([part[None] for part in x.float().transpose(0, 1).split(lengths, 1)] for x in (query, key, value))
    for queries, keys, values in zip(*split, strict=True):
        place = torch.arange(queries.shape[2])
        age = place[:, None] - place
        seen = (age >= 0) & ((age <= window_size_left) | torch.tensor(window_size_left < 0))
        attended = F.scaled_dot_product_attention(queries, keys, values, seen, scale=scale, enable_gqa=True)
        parts.append(attended[0].transpose(0, 1))
    none = query.new_empty(0)
    return torch.cat(parts).to(query.dtype), none, none, none, none
