"""Where a session is paused, as its checkpoint tells: what needs no request."""

from __future__ import annotations

from abc import ABC, abstractmethod

from client.breakpoint_models import CheckpointInfo, Positions
from client.tensors import FloatArray


class Place:
    """The place that `info` names."""

    def __init__(self, info: CheckpointInfo) -> None:
        self.info = info

    @property
    def layer(self) -> int:
        """The last layer that ran."""
        return self.info.layer

    @property
    def first(self) -> int:
        """The first position of the pass."""
        return self.info.first

    @property
    def end(self) -> int:
        """The position after the last of the pass."""
        return self.info.end

    @property
    def shape(self) -> tuple[int, int]:
        """Of the residual stream: `(end - first, hidden_size)`."""
        return self.info.shape


class BlockingPlace(Place, ABC):
    """The blocking client's, with a property that asks the server; asyncio cannot await a property."""

    @property
    def activation(self) -> FloatArray:
        """The residual stream at all positions, fetched anew each time; see `read`."""
        return self.read()

    @abstractmethod
    def read(self, positions: Positions = "all") -> FloatArray:
        """The residual stream at `positions`."""
