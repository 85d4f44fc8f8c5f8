"""Where a pass finds its weights: some stay on the device, the others come through two buffers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

BUFFERS = 2
"""One is filled while the other is computed with."""


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
        if index in self._kept:
            yield self._kept[index]
            return
        buffer = self._stream.next()
        try:
            yield buffer
        finally:
            self._stream.release(buffer)
