"""What the runner needs of a model: a stack of layers that can be entered and left at any boundary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.domain.points import Point, Points
from app.gpu.kernels.attention.base import Batch
from app.gpu.state.checkpoints import InParts, T
from app.gpu.state.layer_state import LayerState, state_bytes
from app.model_store.saved import Config

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Relative L2 error of the logits that rounding may cause; a misread architecture or a wrong graph is far above it."""
_LENGTH_DEPENDENT = {"dynamic", "longrope"}


class LayerStack(Protocol):
    """A decoder as separate steps. All state is an argument, so two cohorts at different layers can coexist."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    kv_heads: int
    """Those whose KV is here: of a shard, its own."""
    head_dim: int
    max_model_len: int
    states: Sequence[LayerState]
    """What a session keeps in each layer."""
    dtype: torch.dtype
    device: torch.device
    parameter_bytes: int
    """Of the whole model."""
    points: Points
    """What it has, of which `Batch.taps` are told those inside a layer."""

    @property
    def head_in_parts(self) -> Callable[[Tensor], InParts[Tensor]] | None:
        """Does what `head` does. None where that is one piece of work, as with streamed weights."""
        ...

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids and positions, `[tokens]` int64 each, to the residual stream `[tokens, hidden_size]`."""
        ...

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        """Run layer `index` on `hidden` `[tokens, hidden_size]`; returns the same shape, in a new tensor.

        `kv` is this layer's part of the pool, `[blocks, 2, kv_heads, block_size, head_dim]`; the batch's keys and
        values are written to it. The result is what Transformers calls `hidden_states[index + 1]` (before the final
        norm). A layer that folds replaces its part of `batch.states`.
        """
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm alone, of `[rows, hidden_size]`: of the last layer's output it makes what Transformers calls
        `hidden_states[num_layers]`.
        """
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Final norm and output projection: `[rows, hidden_size]` to float32 logits `[rows, vocab_size]`."""
        ...

    def unembed(self, normed: Tensor) -> Tensor:
        """What `head` makes of the result of `normed`."""
        ...

    def toward(self, token_id: int) -> InParts[Tensor]:
        """The direction of the logit of a token, before any cap: the products of `normed`'s result with it. Float32
        `[hidden_size]`. Raises `FieldOutOfRange` where only all ranks together have it.
        """
        ...

    def written(
        self, index: int, point: Point, parts: Tensor, whole: Tensor, adapters: Sequence[tuple[Any, Any]]
    ) -> Tensor | None:
        """What layer `index` adds to the residual stream for each of `parts` `[rows, width]` of the activation at
        `point`, `z` or `mlp_post`, before its output projection: `[rows, hidden_size]`, each with the projection's
        bias. A norm after the projection has the scale that it has for the `whole` activation `[width]`. `adapters` are
        those of `Batch`. None: the output is not linear in the activation, as with a gate, or is not known.
        """
        ...


def finish(work: InParts[T]) -> T:
    """Do all parts; returns the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: T = end.value
            return found


def with_new_states(stack: LayerStack, batch: Batch) -> Batch:
    """The batch with states of rows that have had no token, where the stack folds."""
    size, rows = state_bytes(stack.states), len(batch.contexts)
    if not size:
        return batch
    return replace(batch, states=torch.zeros((rows, size), dtype=torch.uint8, device=stack.device))


def require_fixed_rope(config: Config) -> None:
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
