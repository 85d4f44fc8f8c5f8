"""A bundle in a file that the system has in memory: it is copied to its place in the ring only as far as it must be."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from app.domain.errors import WeightsLost
from app.gpu.device.streams import Event
from app.gpu.weights.file import BundleFile
from app.gpu.weights.layout import Piece, host_bytes

CLOSED = "the server is about to end: no weights are loaded any more"
_SMALL_BYTES = 1 << 16
"""A tensor of at most so many bytes, such as a norm's weight, is copied alone."""


class CachedBundle:
    """See `Event`: who waits for it makes the copy, on the threads that PyTorch computes with. It is for one thread.

    Who multiplies its weights where they are, in the file, needs no copy: see `tensor`.
    """

    def __init__(
        self, file: BundleFile, index: int, target: Tensor, after: Sequence[Event], closed: threading.Event
    ) -> None:
        """`target` may be written to once every event of `after` has passed. Nothing is read any more when `closed`."""
        self._file, self._section, self._target = file, file.bundles[index], target
        self._after, self._closed, self._descriptor = after, closed, file.fileno()
        self._copied: Future[None] = Future()

    def query(self) -> bool:
        return self._copied.done()

    def synchronize(self) -> None:
        """See `Event.synchronize`. Raises `WeightsLost`."""
        if not self._copied.done():
            try:
                self._copy()
            except WeightsLost as error:
                self._copied.set_exception(error)
            else:
                self._copied.set_result(None)
        self._copied.result()

    def guards(self) -> list[Event]:
        """What must still pass before anybody writes to its place, as nobody has waited for it yet. Who is given the
        place next waits for these, and not for the bundle: that one is not brought any more.
        """
        return [event for event in self._after if not event.query()]

    def is_intact(self) -> bool:
        """Whether what has been read of it in the file until now is what was stored."""
        return not self._closed.is_set() and self._file.is_intact(self._section)

    def tensor(self, piece: Piece) -> CachedTensor:
        """One of its tensors."""
        return CachedTensor(self, piece, self._descriptor, self._section.offset + piece.offset)

    def bring(self, piece: Piece) -> Tensor:
        """The tensor in its place, where its bytes are now: its own alone, if they are few and as they were stored, or
        all of the bundle. Raises `WeightsLost`.
        """
        tensor = piece.view(self._target)
        if tensor.nbytes <= _SMALL_BYTES and not self._copied.done() and not self._closed.is_set():
            wait_for(self._after)
            self._file.read(self._section, piece.offset, host_bytes(tensor))
            if self.is_intact():
                return tensor
        self.synchronize()
        return tensor

    def _copy(self) -> None:
        from app.gpu.kernels.cpu.reading import read_on_torch_threads  # imports Numba, which only a CPU needs

        wait_for(self._after)
        if self._closed.is_set():
            raise WeightsLost(CLOSED)
        before = self._file.state()
        if not read_on_torch_threads(self._descriptor, self._section.offset, self._target):
            self._file.read(self._section, 0, host_bytes(self._target))
        self._file.prove_copy(self._section, host_bytes(self._target), before)


@dataclass(slots=True)
class CachedTensor:
    """See `FilePlace`."""

    bundle: CachedBundle
    piece: Piece
    file: int
    offset: int

    def is_intact(self) -> bool:
        return self.bundle.is_intact()

    def bring(self) -> Tensor:
        return self.bundle.bring(self.piece)


def guards_of(events: Iterable[Event]) -> list[Event]:
    """What must pass before anybody writes where the events' loads write or would have written. Who waits for a cached
    bundle is the thread that brings it: one that has not been brought by now never will be.
    """
    return [guard for event in events for guard in (event.guards() if isinstance(event, CachedBundle) else [event])]


def wait_for(events: Iterable[Event]) -> None:
    """Wait until nothing that these events stand for reads or writes any more."""
    for event in events:
        with suppress(WeightsLost):  # what has failed does not write either
            event.synchronize()
