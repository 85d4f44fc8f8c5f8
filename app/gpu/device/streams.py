"""What a device does in which order: streams of work, events that mark a point in one, memory that both sides reach.

`compute` is where PyTorch's operations of the engine thread run. KV moves have a stream each way, `to_host` and
`to_device`, and activations one of their own, `saves`: they must not queue behind a session's whole KV. Neither must
they queue behind `weights`, where those that are streamed come to the device. Streams know nothing of each other;
a stream that needs the work of another one waits for its event.

On a CPU an operation has been done when its call returns, so every event that a stream records has passed.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from app.gpu.device.memory import zeroed

Run = tuple[slice, slice]
"""Rows of one tensor, and as many of another."""
WHOLE: tuple[Run] = ((slice(None), slice(None)),)


class Event(Protocol):
    """A point in the work of a stream. May be waited for from any thread."""

    def query(self) -> bool:
        """Whether the stream has passed it."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the stream has passed it; the GIL is released meanwhile."""
        ...


class Stream(Protocol):
    """Work that is done in the order it was launched in. Launching returns at once."""

    def record(self) -> Event:
        """The point after everything that has been launched until now."""
        ...

    def wait(self, event: Event) -> None:
        """What is launched from now on runs after `event`, of whatever stream."""
        ...

    def copy(self, target: Tensor, source: Tensor, runs: Iterable[Run] = WHOLE) -> None:
        """Launch copies of rows `runs[i][1]` of `source` to rows `runs[i][0]` of `target`: tensors of one dtype and one
        shape of rows, each dense. Host memory must come from `DeviceStreams`. The memory of neither is given to another
        tensor before the copies have been done.
        """
        ...


class DeviceStreams(Protocol):
    """The streams of one device."""

    compute: Stream
    to_host: Stream
    to_device: Stream
    saves: Stream
    weights: Stream
    on_host: bool
    """Whether the device's memory is the host's and its work is done when a call returns."""

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory that copies to and from the device overlap with other work; small and often."""
        ...

    def host_slab(self, shape: tuple[int, ...]) -> Tensor:
        """The same as bytes, zeros: large, once. Raises MemoryError where the machine does not grant it."""
        ...


class _Passed:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuStream:
    """See `Stream`."""

    def record(self) -> Event:
        return PASSED

    def wait(self, event: Event) -> None:
        """See `Stream.wait`. The calling thread does this stream's work, so it is the one that waits: an event of the
        thread that reads weights from a file need not have passed.
        """
        event.synchronize()

    def copy(self, target: Tensor, source: Tensor, runs: Iterable[Run] = WHOLE) -> None:
        """See `Stream.copy`. On the calling thread, as PyTorch's own are busy with the model, and without the GIL."""
        goal, origin = _bytes(target), _bytes(source)
        for write, read in runs:
            np.copyto(goal[write], origin[read])


class CpuStreams:
    """See `DeviceStreams`."""

    on_host = True

    def __init__(self) -> None:
        self.compute: Stream = CpuStream()
        self.to_host: Stream = CpuStream()
        self.to_device: Stream = CpuStream()
        self.saves: Stream = CpuStream()
        self.weights: Stream = CpuStream()

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def host_slab(self, shape: tuple[int, ...]) -> Tensor:
        return zeroed(shape, torch.uint8, torch.device("cpu"))


PASSED: Event = _Passed()
"""For work that is done when its call returns."""


def _bytes(tensor: Tensor) -> Any:
    """The tensor's memory as NumPy sees it, which has no bfloat16."""
    return tensor.view(torch.uint8).numpy()
