"""What breakpoints leave: captures, and the place of a pause."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from client.breakpoint_models import CheckpointInfo, Positions
from client.calls import UNSET, Seconds
from client.pictures import patterns, svg
from client.tensors import FloatArray, load


@dataclass(frozen=True, slots=True)
class Capture:
    """What one breakpoint recorded at a `point` of `layer` in one pass.

    `activation` is `[len(positions), width]`, in float32 or float16; where there are heads
    `[len(positions), heads, head_dim]`, and of patterns `[len(positions), heads, keys]`. `token_ids` stand at the
    `positions`; `heads` are which, None if all.
    """

    breakpoint: str
    layer: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    activation: FloatArray
    point: str = "resid_post"
    heads: tuple[int, ...] | None = None

    def _repr_svg_(self) -> str | None:
        """A pattern has a picture."""
        if self.point != "pattern":
            return None
        caption = f"layer {self.layer}, positions {self.positions[0]} to {self.positions[-1]}"
        return svg([patterns(caption, self.heads or range(self.activation.shape[1]), self.activation)])


@dataclass(frozen=True, slots=True)
class Captures:
    """Everything recorded in a session, oldest first. `dropped` more found no room on the server."""

    records: tuple[Capture, ...]
    dropped: int


def parse_captures(body: bytes) -> Captures:
    """Read the file that the server sends. Raises ValueError if it is not one."""
    tensors, metadata = load(body)
    try:
        records = tuple(_capture(metadata[name], tensors[name]) for name in sorted(tensors))
        return Captures(records, int(metadata["dropped"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"the metadata does not tell {error}") from error


def _capture(described: str, activation: FloatArray) -> Capture:
    fields: dict[str, Any] = json.loads(described)
    return Capture(
        breakpoint=fields["breakpoint"],
        layer=fields["layer"],
        positions=tuple(fields["positions"]),
        token_ids=tuple(fields["token_ids"]),
        activation=activation,
        point=fields["point"],
        heads=None if fields["heads"] is None else tuple(fields["heads"]),
    )


class Place:
    """The place that `info` names."""

    def __init__(self, info: CheckpointInfo) -> None:
        self.info = info

    def __repr__(self) -> str:
        point = "" if self.point == "resid_post" else f", point={self.point!r}"
        return f"{type(self).__name__}(layer={self.layer}{point}, first={self.first}, end={self.end})"

    @property
    def layer(self) -> int:
        """The layer that the pass has stopped in, or after."""
        return self.info.layer

    @property
    def point(self) -> str:
        """Where in the layer."""
        return self.info.point

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
        """Of what stands there: `(end - first, hidden_size)`, of a point as wide as that."""
        return self.info.shape


class BlockingPlace(Place, ABC):
    """The blocking client's, with a property that asks the server; asyncio cannot await a property."""

    @property
    def activation(self) -> FloatArray:
        """The residual stream at all positions, fetched anew each time; see `read`."""
        return self.read()

    @abstractmethod
    def read(self, positions: Positions = "all", *, timeout: Seconds = UNSET) -> FloatArray:
        """The residual stream at `positions`."""
