"""Two buffers, of which one is filled while the other is computed with.

From a file on a CPU, by a thread that reads; from pinned host memory on CUDA, on a stream of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of the host's copy that one bundle takes."""

    offset: int
    nbytes: int


class Stream(Protocol):
    """The bundles that are streamed, one after the other, round and round."""

    def next(self) -> Tensor:
        """The buffer with the next one, uint8, which must be released before the one after the next can come."""
        ...

    def release(self, buffer: Tensor) -> None:
        """What has been launched until now is the last that uses it."""
        ...

    def time_copies(self, passes: int) -> float:
        """Seconds that it takes to copy all of them `passes` times, into two other buffers, and do nothing else."""
        ...


class KeptAndStreamed:
    """A `Feed`: some bundles stay on the device, the others are streamed."""

    def __init__(self, kept: Mapping[int, Tensor], stream: Stream) -> None:
        self._kept = kept
        self._stream = stream

    @contextmanager
    def use(self, index: int) -> Iterator[Tensor]:
        """See `Feed`."""
        if index in self._kept:
            yield self._kept[index]
            return
        buffer = self._stream.next()
        try:
            yield buffer
        finally:
            self._stream.release(buffer)


class FileStream:
    """See `Stream`: from a file, by a thread of its own."""

    def __init__(self, path: Path, spans: list[Span]) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._spans = spans
        self._size = max(span.nbytes for span in spans)
        self._empty: SimpleQueue[Tensor] = SimpleQueue()
        self._full: SimpleQueue[Tensor | Exception] = SimpleQueue()
        for _ in range(BUFFERS):
            self._empty.put(torch.zeros(self._size, dtype=torch.uint8))
        threading.Thread(target=self._fill, daemon=True).start()

    def next(self) -> Tensor:
        """See `Stream`. Raises OSError if the file cannot be read."""
        found = self._full.get()
        if isinstance(found, Exception):
            raise found
        return found

    def release(self, buffer: Tensor) -> None:
        """See `Stream`."""
        self._empty.put(buffer)

    def time_copies(self, passes: int) -> float:
        """See `Stream`."""
        buffers = torch.zeros(BUFFERS, self._size, dtype=torch.uint8)
        began = time.perf_counter()
        for span, buffer in zip(self._spans * passes, cycle(buffers), strict=False):
            self._read(span, buffer)
        return time.perf_counter() - began

    def _fill(self) -> None:
        try:
            for span in cycle(self._spans):
                buffer = self._empty.get()
                self._read(span, buffer)
                self._full.put(buffer)
        except OSError as error:
            self._full.put(error)

    def _read(self, span: Span, target: Tensor) -> None:
        """One call reads at most 2 GiB."""
        view, done = target.numpy().data[: span.nbytes], 0
        while done < span.nbytes:
            count = os.preadv(self._file, [view[done:]], span.offset + done)
            if not count:
                raise OSError("the file of the weights has become shorter")
            done += count


class PinnedStream:
    """See `Stream`: from pinned host memory to a CUDA device. A buffer is written when what used it has run."""

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
        """See `Stream`."""
        buffer, there = self._ahead.get()
        torch.cuda.current_stream(self._device).wait_event(there)
        return buffer

    def release(self, buffer: Tensor) -> None:
        """See `Stream`."""
        self._launch(buffer)

    def time_copies(self, passes: int) -> float:
        """See `Stream`."""
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
