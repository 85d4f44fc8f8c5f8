"""The small copies around a step: what it needs goes up as one, what it found comes down behind one event."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.gpu.device.streams import PASSED, DeviceStreams, Event

Put = Callable[[np.ndarray[Any, Any]], Tensor]
"""Gives an array its place on the device."""
PAGE_BYTES = 1 << 18
_ALIGNMENT = 16
"""Bytes: enough for any element, and for the vector loads of kernels."""


def put_each(device: torch.device) -> Put:
    """Takes every array by itself, and waits for it: for what is done once, outside a step."""
    return lambda array: torch.from_numpy(array).to(device)


class Staging:
    """Collects a step's arrays in host memory and sends them to the device in one copy.

    The host memory is written again by the next step, once the copy out of it is done; the device memory is the step's
    own.
    """

    def __init__(self, streams: DeviceStreams, device: torch.device) -> None:
        self._streams = streams
        self._device = device
        self._page_bytes = PAGE_BYTES
        self._page = self._new_page(PAGE_BYTES)
        self._sent: Event = PASSED
        self._filled: list[tuple[Tensor, Tensor, int]] = []
        self._used = 0

    def begin(self) -> None:
        """A new step: forget what has been put and not sent, and wait until the memory may be written to."""
        self._sent.synchronize()
        self._filled.clear()
        if self._page.numel() < self._page_bytes:
            self._page = self._new_page(self._page_bytes)
        self._open(self._page)

    def put(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A device tensor of the array's shape and dtype, which has its values for what is launched after `send`."""
        if self._used + array.nbytes > self._here.numel():
            self._filled.append((self._here, self._there, self._used))
            self._open(self._new_page(max(array.nbytes, PAGE_BYTES)))
        begin, end = self._used, self._used + array.nbytes
        self._bytes[begin:end].view(array.dtype).reshape(array.shape)[...] = array
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        there = self._there[begin:end].view(_DTYPES[array.dtype])
        return there if array.ndim == 1 else there.view(array.shape)

    def send(self) -> None:
        """Launch the copy. More than one are needed only for the first step that is as large as none before."""
        pages = [*self._filled, (self._here, self._there, self._used)]
        for here, there, used in pages:
            self._streams.compute.copy(there[:used], here[:used])
        self._sent = self._streams.compute.record()
        self._page_bytes = max(self._page_bytes, sum(here.numel() for here, _, _ in pages))

    def _open(self, page: Tensor) -> None:
        self._here, self._bytes, self._used = page, page.numpy(), 0
        self._there = torch.empty(page.numel(), dtype=torch.uint8, device=self._device)

    def _new_page(self, size: int) -> Tensor:
        return self._streams.host_tensor((size,), torch.uint8)


class Download:
    """Brings small results to the host, behind what computes them; read them after `finish` and its event."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams

    def fetch(self, tensor: Tensor) -> Tensor:
        """The host tensor that will hold the values of `tensor`."""
        there = tensor.contiguous()
        here = self._streams.host_tensor(tuple(there.shape), there.dtype)
        self._streams.compute.copy(here, there)
        return here

    def finish(self) -> Event:
        """The point at which everything that was fetched has arrived. On the compute stream: nothing of the step comes
        after it, and behind a session's KV it would be late.
        """
        return self._streams.compute.record()


_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int64", "int32", "float64", "float32", "uint8")}
