"""Edits of the residual stream: the arithmetic of `EditOp`, in float32 whatever the model's dtype."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from app.breakpoints import Edit, EditOp, TensorData


def apply_edit(hidden: Tensor, edit: Edit) -> None:
    """Change `hidden` `[positions, hidden_size]` in place; every row is a chosen position."""
    before = hidden.float()
    after = _changed(before, edit)
    if edit.max_norm is not None:
        change = after - before
        length = torch.linalg.vector_norm(change, dim=-1, keepdim=True, dtype=torch.float64)  # squares overflow float32
        after = before + change * (edit.max_norm / length).clamp(max=1.0)
    hidden.copy_(after)


def as_tensor(data: TensorData, device: torch.device) -> Tensor:
    """The tensor in its own shape and dtype. Not to be written to."""
    return torch.frombuffer(bytearray(data.data), dtype=getattr(torch, data.dtype)).view(data.shape).to(device)


@lru_cache(maxsize=256)
def _steering_vector(data: TensorData, device: str) -> Tensor:
    """A vector `[hidden_size]` in float32. A persistent edit asks for it in every step."""
    return as_tensor(data, torch.device(device)).float()


def _changed(hidden: Tensor, edit: Edit) -> Tensor:
    """`hidden` float32 `[positions, hidden_size]` after the edit, without its `max_norm`."""
    if edit.op is EditOp.SCALE:
        return hidden * edit.factor
    if edit.op is EditOp.ABLATE:
        return torch.zeros_like(hidden)
    assert edit.vector is not None
    single = len(edit.vector.shape) == 1
    vector = _steering_vector(edit.vector, str(hidden.device)) if single else as_tensor(edit.vector, hidden.device)
    vector = vector.float()
    if edit.op is EditOp.ADD:
        return hidden + edit.factor * vector
    if edit.op is EditOp.REPLACE:
        return vector.expand_as(hidden)
    unit: Tensor = vector / torch.linalg.vector_norm(vector)
    component = (hidden @ unit).unsqueeze(-1)
    wanted = edit.factor if edit.op is EditOp.CLAMP else 0.0
    return hidden + (wanted - component) * unit
