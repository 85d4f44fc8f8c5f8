"""Streams on a CUDA device, and pinned host memory. Nothing else in the engine asks CUDA for either."""

import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from app.gpu.device.memory import touch, zeroed
from app.gpu.device.streams import PASSED, WHOLE, Event, Run, Stream
from app.machine.memory import read_host_memory

_PORTABLE = 1
"""`cudaHostRegisterPortable` of the CUDA runtime API: pinned for every device."""


class CudaStream:
    """See `Stream`. A `patient` one is waited for asleep, which costs microseconds but no core."""

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
        """See `Stream.copy`. PyTorch keeps pinned memory of its own until the copies that it has launched are done; for
        device memory that has been allocated on another stream it must be told.
        """
        with torch.cuda.stream(self._stream):
            for write, read in runs:
                target[write].copy_(source[read], non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)


class CudaStreams:
    """See `DeviceStreams`. The engine computes on the default stream; the others do not synchronise with it."""

    on_host = False

    def __init__(self, device: torch.device) -> None:
        self.compute: Stream = CudaStream(torch.cuda.default_stream(device), patient=False)
        self.to_host: Stream = CudaStream(torch.cuda.Stream(device), patient=True)
        self.to_device: Stream = CudaStream(torch.cuda.Stream(device), patient=True)
        self.saves: Stream = CudaStream(torch.cuda.Stream(device), patient=True)
        self.weights: Stream = CudaStream(torch.cuda.Stream(device), patient=True)

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `DeviceStreams.host_tensor`. PyTorch keeps what is freed for the next of its size."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def host_slab(self, shape: tuple[int, ...]) -> Tensor:
        """See `DeviceStreams.host_slab`. Pinned where it is: PyTorch's own pinned memory comes in powers of two."""
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
