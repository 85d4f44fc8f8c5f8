"""A residual stream in host memory, on its way there or complete; the engine does not wait for the copy."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from app.domain.breakpoints import Edit, TensorData
from app.gpu.device.dtypes import dtype_name
from app.gpu.device.streams import PASSED, DeviceStreams, Event
from app.gpu.forward.edits import apply_edit, as_tensor
from app.gpu.state.checkpoints import StoredTensor


class HostTensor:
    """`[positions, hidden_size]`, complete when `tensor` is read. Nothing changes it."""

    def __init__(self, tensor: Tensor, streams: DeviceStreams, copied: Event = PASSED, save_ms: float = 0.0) -> None:
        self._tensor = tensor
        self._streams = streams
        self._copied = copied
        self.save_ms = save_ms
        self.dtype = dtype_name(tensor.dtype)
        self.shape = (tensor.shape[0], tensor.shape[1])
        self.nbytes = tensor.nbytes

    @classmethod
    def save(cls, hidden: Tensor, streams: DeviceStreams) -> HostTensor:
        """Copy a part of the residual stream, `[positions, hidden_size]`, once it is computed and beside the work that
        comes next; nothing may write to it any more.
        """
        began = time.perf_counter()
        saved = streams.host_tensor(tuple(hidden.shape), hidden.dtype)
        streams.saves.wait(streams.compute.record())
        streams.saves.copy(saved, hidden)
        return cls(saved, streams, streams.saves.record(), (time.perf_counter() - began) * 1000)

    @classmethod
    def of(cls, data: TensorData, streams: DeviceStreams) -> HostTensor:
        """A tensor that a client has sent."""
        brought = as_tensor(data)
        return cls(_copy(brought, streams), streams)

    @classmethod
    def joined(cls, parts: Sequence[StoredTensor]) -> HostTensor:
        """The rows of all parts, in this order. Waits for them."""
        saved = [part for part in parts if isinstance(part, HostTensor)]
        if len(saved) == 1:
            return saved[0]
        streams, save_ms = saved[0]._streams, sum(part.save_ms for part in saved)
        return cls(_copy(torch.cat([part.tensor for part in saved]), streams), streams, save_ms=save_ms)

    @property
    def tensor(self) -> Tensor:
        """Waits for the copy if it is still under way."""
        self._copied.synchronize()
        return self._tensor

    def load(self, hidden: Tensor, first: int = 0) -> None:
        """Put as many rows as `hidden` has, from row `first` on, into it, before what is launched next reads it."""
        self._streams.compute.wait(self._copied)
        self._streams.compute.copy(hidden, self._tensor[first : first + len(hidden)])

    def read(self, first: int, end: int) -> TensorData:
        """Rows `[first, end)` as bytes."""
        rows = self.tensor[first:end].contiguous()
        return TensorData(self.dtype, tuple(rows.shape), rows.view(torch.uint8).numpy().tobytes())

    def edited(self, first: int, end: int, edit: Edit) -> HostTensor:
        """The same with `edit` applied to rows `[first, end)`."""
        changed = _copy(self.tensor, self._streams)
        apply_edit(changed[first:end], edit)
        return HostTensor(changed, self._streams, save_ms=self.save_ms)

    def norms(self, first: int, end: int) -> list[float]:
        """See `StoredTensor.norms`. In float64, as squares of large numbers would overflow."""
        found: list[float] = torch.linalg.vector_norm(self.tensor[first:end].double(), dim=1).tolist()
        return found

    def cosines(self, first: int, end: int, vector: TensorData) -> list[float]:
        """See `StoredTensor.cosines`."""
        rows, wanted = self.tensor[first:end].double(), as_tensor(vector).double()
        found: list[float] = (rows @ wanted / torch.linalg.vector_norm(rows, dim=1) / wanted.norm()).tolist()
        return found

    def is_finite(self) -> bool:
        """Whether it has neither NaN nor infinity."""
        return bool(torch.isfinite(self.tensor).all())


def _copy(tensor: Tensor, streams: DeviceStreams) -> Tensor:
    """The same in memory that is fast to copy to the device."""
    return streams.host_tensor(tuple(tensor.shape), tensor.dtype).copy_(tensor)
