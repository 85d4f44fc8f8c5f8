"""Rotary position embedding (Su et al., arXiv:2104.09864), from a table with one row per position."""

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from app.domain.errors import FieldOutOfRange
from app.gpu.models.elementwise import rotate

_LENGTH_DEPENDENT = {"dynamic", "longrope"}


def require_fixed_rope(config: PretrainedConfig) -> None:
    """Raise FieldOutOfRange for rotary frequencies that change with the sequence's length.

    Sessions of other lengths share the batch, and keys in the KV cache keep the frequency they were written with.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in per_layer_type or [parameters]:
        if entry.get("rope_type") in _LENGTH_DEPENDENT:
            raise FieldOutOfRange(
                f"rope_type {entry['rope_type']!r} is not supported: its frequencies depend on the sequence length",
                param="model",
            )


class Rotary:
    """Rotates the halves of each head as Transformers does, with Transformers' own frequencies and scaling."""

    def __init__(self, config: PretrainedConfig, positions: int, device: torch.device, dtype: torch.dtype) -> None:
        require_fixed_rope(config)
        like = torch.empty(0, device=device, dtype=dtype)
        cos, sin = LlamaRotaryEmbedding(cast("Any", config))(like, torch.arange(positions, device=device)[None])
        half = cos.shape[-1] // 2
        self._table = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).contiguous()

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` `[tokens, heads, head_dim]` by `positions` `[tokens]`, into a new contiguous tensor."""
        return rotate(x, self._table, positions)
