"""Rotary position embedding (Su et al., arXiv:2104.09864), from a table with one row per position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.models.elementwise import rotate

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
        frequencies, scale = _frequencies(config)
        angles = torch.arange(positions, device=device)[:, None].float() * frequencies.to(device, torch.float32)
        self._table = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(dtype)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` `[tokens, heads, head_dim]` by `positions` `[tokens]`, into a new contiguous tensor."""
        return rotate(x, self._table, positions)


def _frequencies(config: PretrainedConfig) -> tuple[Tensor, float]:
    """Of each pair of values `[head_dim / 2]`, and the factor of cosines and sines."""
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[kind](cast("Any", config))
        return scaled
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 1.0 / (config.rope_parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width)), 1.0
