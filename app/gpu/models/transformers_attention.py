"""Djinn's attention behind Transformers' attention interface, so that any model's own modules can call it."""

from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch

NAME = "djinn_paged"

# Keywords that reach the interface and do not change what is computed here: positions are in the batch, there is no
# dropout outside training, no cache but the pool, and causality is implied.
_WITHOUT_EFFECT = {"cache_position", "dropout", "is_causal", "position_ids", "use_cache"}


@dataclass(frozen=True, slots=True)
class Paged:
    """Travels through a layer's keyword arguments to its attention."""

    attention: Attention
    batch: Batch
    kv: Tensor


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: Paged | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | EllipsisType | None = ...,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function Transformers calls: query `[1, heads, tokens, head_dim]`, result `[1, tokens, heads, head_dim]`.

    Raises ValueError for a model that asks of attention what `AttentionSpec` cannot say.
    """
    if paged is None:
        raise ValueError("its layers do not pass keyword arguments on to attention")
    extra = sorted(name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT)
    if extra:
        raise ValueError(f"its attention takes {', '.join(extra)}")
    if isinstance(sliding_window, EllipsisType):
        if getattr(module.config, "sliding_window", None) is not None:
            raise ValueError("it has a sliding window and does not pass it on to attention")
        sliding_window = None
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ValueError("its attention is not causal")
    spec = AttentionSpec(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling, window=sliding_window, softcap=softcap
    )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return paged.attention(query, key, value, paged.kv, paged.batch, spec)[None], None


AttentionInterface.register(NAME, paged_attention)
