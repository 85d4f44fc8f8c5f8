"""Weights that a CPU reads from a file, on a thread of its own."""

import os
import threading
import time
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from loadgen.rivals.double_buffer.feeds import BUFFERS, Span


class FileStream:
    """See `Stream`."""

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
        self._empty.put(buffer)

    def time_copies(self, passes: int) -> float:
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
