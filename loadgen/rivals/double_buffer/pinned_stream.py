"""Weights that a CUDA device is sent from pinned host memory, on a stream of its own."""

import time
from itertools import cycle
from queue import SimpleQueue

import torch
from torch import Tensor

from loadgen.rivals.double_buffer.feeds import BUFFERS, Span


class PinnedStream:
    """See `Stream`. A buffer is written when what used it has run."""

    def __init__(self, host: Tensor, spans: list[Span], device: torch.device) -> None:
        self._host = host
        self._spans = spans
        self._device = device
        self._size = max(span.nbytes for span in spans)
        self._copies = torch.cuda.Stream(device)
        self._ahead: SimpleQueue[tuple[Tensor, torch.cuda.Event]] = SimpleQueue()
        self._order = cycle(spans)
        for _ in range(BUFFERS):
            self._launch(torch.zeros(self._size, dtype=torch.uint8, device=device))

    def next(self) -> Tensor:
        buffer, there = self._ahead.get()
        torch.cuda.current_stream(self._device).wait_event(there)
        return buffer

    def release(self, buffer: Tensor) -> None:
        self._launch(buffer)

    def time_copies(self, passes: int) -> float:
        buffers = torch.zeros(BUFFERS, self._size, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        with torch.cuda.stream(self._copies):
            for span, buffer in zip(self._spans * passes, cycle(buffers), strict=False):
                self._copy(span, buffer)
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - began

    def _launch(self, buffer: Tensor) -> None:
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            self._copy(next(self._order), buffer)
            there = torch.cuda.Event()
            there.record()
        self._ahead.put((buffer, there))

    def _copy(self, span: Span, target: Tensor) -> None:
        target[: span.nbytes].copy_(self._host[span.offset : span.offset + span.nbytes], non_blocking=True)
