"""Edits of the residual stream: the arithmetic of `EditOp`, in float32 whatever the model's dtype."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from app.domain.breakpoints import Edit, EditOp, TensorData
from app.gpu.device.streams import DeviceStreams

KEPT_VECTORS = 256


def as_tensor(data: TensorData) -> Tensor:
    """The tensor in its own shape and dtype, in host memory. Not to be written to."""
    return torch.frombuffer(bytearray(data.data), dtype=getattr(torch, data.dtype)).view(data.shape)


class DeviceVectors:
    """Brings the tensors of edits to a device without waiting for it; none of them is to be written to."""

    def __init__(self, streams: DeviceStreams, device: torch.device) -> None:
        self._streams = streams
        self._device = device
        self._kept = lru_cache(maxsize=KEPT_VECTORS)(self._bring)

    def place(self, data: TensorData) -> Tensor:
        """In float32. A single vector is kept: a persistent edit asks for it in every step."""
        return self._kept(data) if len(data.shape) == 1 else self._bring(data)

    def _bring(self, data: TensorData) -> Tensor:
        here = as_tensor(data)
        sent = self._streams.host_tensor(tuple(here.shape), here.dtype).copy_(here)
        there = torch.empty(here.shape, dtype=here.dtype, device=self._device)
        self._streams.compute.copy(there, sent)
        return there.float()


def apply_edit(hidden: Tensor, edit: Edit, place: Callable[[TensorData], Tensor] = as_tensor) -> None:
    """Change `hidden` `[positions, hidden_size]` in place; every row is a chosen position. `place` gives the edit's
    tensor where `hidden` is.
    """
    before = hidden.float()
    after = _changed(before, edit, place)
    if edit.max_norm is not None:
        change = after - before
        length = torch.linalg.vector_norm(change, dim=-1, keepdim=True, dtype=torch.float64)  # squares overflow float32
        after = before + change * (edit.max_norm / length).clamp(max=1.0)
    hidden.copy_(after)


def _changed(hidden: Tensor, edit: Edit, place: Callable[[TensorData], Tensor]) -> Tensor:
    """`hidden` float32 `[positions, hidden_size]` after the edit, without its `max_norm`."""
    if edit.op is EditOp.SCALE:
        return hidden * edit.factor
    if edit.op is EditOp.ABLATE:
        return torch.zeros_like(hidden)
    assert edit.vector is not None
    vector = place(edit.vector).float()
    if edit.op is EditOp.ADD:
        return hidden + edit.factor * vector
    if edit.op is EditOp.REPLACE:
        return vector.expand_as(hidden)
    unit: Tensor = vector / torch.linalg.vector_norm(vector)
    component = (hidden * unit).sum(
        -1, keepdim=True
    )  # unlike a product's, a CPU's bits are the same for any number of rows
    wanted = edit.factor if edit.op is EditOp.CLAMP else 0.0
    return hidden + (wanted - component) * unit
