"""What a device does in which order: streams of work, events that mark a point in one, memory that both sides reach.

`compute` is where PyTorch's operations of the engine thread run. KV moves have a stream each way, `to_host` and
`to_device`, and activations `saves`: they must not queue behind a session's whole KV, nor behind `weights`, where those
that are streamed come to the device. A stream that needs the work of another one waits for its event. On a CPU an
operation has been done when its call returns, so every event that a stream records has passed.

The small copies around a step go up as one (`Staging`), and come down behind one event (`fetch`).
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from app.gpu.device.hardware import touch, zeroed
from app.machine.memory import read_host_memory

Run = tuple[slice, slice]
"""Rows of one tensor, and as many of another."""
Put = Callable[[np.ndarray[Any, Any]], Tensor]
"""Gives an array its place on the device."""
WHOLE: tuple[Run] = ((slice(None), slice(None)),)
_PORTABLE = 1
"""`cudaHostRegisterPortable` of the CUDA runtime API: pinned for every device."""


PAGE_BYTES = 1 << 18
"""Of host memory that a step's inputs are put into, at least."""
_ALIGNMENT = 16
"""Bytes: enough for any element, and for the vector loads of kernels."""
_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int64", "int32", "float64", "float32", "uint8")}


class Event(Protocol):
    """A point in the work of a stream. May be waited for from any thread."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Block the calling thread until the stream has passed it; the GIL is released meanwhile."""


class Stream(Protocol):
    """Work that is done in the order it was launched in. Launching returns at once."""

    def record(self) -> Event:
        """The point after everything that has been launched until now."""

    def wait(self, event: Event) -> None:
        """What is launched from now on runs after `event`, of whatever stream."""

    def copy(self, target: Tensor, source: Tensor, runs: Iterable[Run] = WHOLE) -> None:
        """Launch copies of rows `runs[i][1]` of `source` to rows `runs[i][0]` of `target`: tensors of one dtype and one
        shape of rows, each dense. Host memory must come from `DeviceStreams`. No memory is reused before the end.
        """


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

    def host_slab(self, shape: tuple[int, ...]) -> Tensor:
        """The same as bytes, zeros: large, once. Raises MemoryError where the machine does not grant it."""


def streams_of(device: torch.device) -> DeviceStreams:
    """The streams of `device`."""
    return CpuStreams() if device.type == "cpu" else CudaStreams(device)


class _Passed:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


PASSED: Event = _Passed()
"""For work that is done when its call returns."""


class CpuStream:
    """A stream of the calling thread, on which all its work is done."""

    def record(self) -> Event:
        return PASSED

    def wait(self, event: Event) -> None:
        """The calling thread waits: an event of the thread that reads weights from a file need not have passed."""
        event.synchronize()

    def copy(self, target: Tensor, source: Tensor, runs: Iterable[Run] = WHOLE) -> None:
        """On the calling thread, as PyTorch's are busy, and without the GIL. As bytes: NumPy has no bfloat16."""
        goal, origin = (tensor.view(torch.uint8).numpy() for tensor in (target, source))
        for write, read in runs:
            np.copyto(goal[write], origin[read])


class CpuStreams:
    """The streams of a CPU."""

    on_host = True

    def __init__(self) -> None:
        own: Stream = CpuStream()
        self.compute = self.to_host = self.to_device = self.saves = self.weights = own

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def host_slab(self, shape: tuple[int, ...]) -> Tensor:
        return zeroed(shape, torch.uint8, torch.device("cpu"))


class CudaStream:
    """A stream of CUDA. A `patient` one is waited for asleep, which costs microseconds but no core."""

    def __init__(self, stream: torch.cuda.Stream, *, patient: bool) -> None:
        self._stream = stream
        self._patient = patient

    def record(self) -> Event:
        event = torch.cuda.Event(blocking=self._patient)
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        if event is not PASSED:
            self._stream.wait_event(cast("torch.cuda.Event", event))

    def copy(self, target: Tensor, source: Tensor, runs: Iterable[Run] = WHOLE) -> None:
        """PyTorch keeps pinned memory until its copies are done. Of device memory of another stream it must be told."""
        with torch.cuda.stream(self._stream):
            for write, read in runs:
                target[write].copy_(source[read], non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)


class CudaStreams:
    """The engine computes on the default stream; the others do not synchronise with it."""

    on_host = False

    def __init__(self, device: torch.device) -> None:
        self.compute: Stream = CudaStream(torch.cuda.default_stream(device), patient=False)
        others: list[Stream] = [CudaStream(torch.cuda.Stream(device), patient=True) for _ in range(4)]
        self.to_host, self.to_device, self.saves, self.weights = others

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned. PyTorch keeps what is freed for the next of its size."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def host_slab(self, shape: tuple[int, ...]) -> Tensor:
        """Pinned where it is: PyTorch's own pinned memory comes in powers of two."""
        slab = zeroed(shape, torch.uint8, torch.device("cpu"))
        if slab.numel():
            if slab.nbytes > read_host_memory().free_bytes:
                raise MemoryError("more than is free")  # the system would end the process, not refuse
            touch(slab)
            cudart: Any = torch.cuda.cudart()
            code = int(cudart.cudaHostRegister(slab.data_ptr(), slab.nbytes, _PORTABLE))
            if code:
                raise MemoryError(f"CUDA error {code}")
            weakref.finalize(slab, cudart.cudaHostUnregister, slab.data_ptr()).atexit = False
        return slab


def put_each(device: torch.device) -> Put:
    """Takes every array by itself, and waits for it: for what is done once, outside a step."""
    return lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)


class Staging:
    """Collects a step's arrays in host memory and sends them to the device, to the step's own memory, in one copy."""

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


def fetch(streams: DeviceStreams, tensor: Tensor) -> Tensor:
    """The host tensor that will hold the values of `tensor`: small results, which lie behind what computes them. Read
    it once an event has passed that the compute stream records from now on.
    """
    there = tensor.contiguous()
    here = streams.host_tensor(tuple(there.shape), there.dtype)
    streams.compute.copy(here, there)
    return here
