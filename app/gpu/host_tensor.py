"""A residual stream in host memory, pinned where a device copies to it; the engine does not wait for the copy."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from app.breakpoints import Edit, TensorData
from app.gpu.edits import apply_edit, as_tensor


class HostTensor:
    """`[positions, hidden_size]`, complete when `tensor` is read. Nothing changes it."""

    def __init__(self, tensor: Tensor, copied: torch.cuda.Event | None = None, save_ms: float = 0.0) -> None:
        self._tensor = tensor
        self._copied = copied
        self.save_ms = save_ms
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = (tensor.shape[0], tensor.shape[1])
        self.nbytes = tensor.nbytes

    @classmethod
    def save(cls, hidden: Tensor) -> HostTensor:
        """Copy a part of the residual stream, `[positions, hidden_size]`, behind what computes it."""
        began, copied = time.perf_counter(), None
        saved = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=hidden.is_cuda)
        saved.copy_(hidden, non_blocking=True)
        if hidden.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        return cls(saved, copied, (time.perf_counter() - began) * 1000)

    @classmethod
    def of(cls, data: TensorData) -> HostTensor:
        """What has come from outside."""
        return cls(as_tensor(data, torch.device("cpu")))

    @property
    def tensor(self) -> Tensor:
        """Waits for the copy if it is still under way."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._tensor

    def load(self, hidden: Tensor) -> None:
        """Put it back into a residual stream of the same shape, in place."""
        hidden.copy_(self.tensor, non_blocking=True)

    def read(self, first: int, end: int) -> TensorData:
        """Rows `[first, end)` as bytes."""
        rows = self.tensor[first:end].contiguous()
        return TensorData(self.dtype, tuple(rows.shape), rows.view(torch.uint8).numpy().tobytes())

    def edited(self, first: int, end: int, edit: Edit) -> HostTensor:
        """The same with `edit` applied to rows `[first, end)`."""
        changed = self.tensor.clone()
        apply_edit(changed[first:end], edit)
        return HostTensor(changed, save_ms=self.save_ms)

    def is_finite(self) -> bool:
        """Whether it has neither NaN nor infinity."""
        return bool(torch.isfinite(self.tensor).all())
