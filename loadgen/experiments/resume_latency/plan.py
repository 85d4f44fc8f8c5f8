"""What the experiment does, decided before it runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.errors import LoadgenError, require_at_least
from loadgen.experiments.resume_latency.findings import Way

DEPTHS = (2.5, 25.0, 50.0, 75.0, 100.0)
LENGTHS = (256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """How much is measured: a pause at each of `depths`, in percent of the model's layers, of sessions of each of
    `lengths` tokens, `repeats` times in every way.

    Raises `LoadgenError` if a value is outside its range.
    """

    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[float, ...] = DEPTHS
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 2 or len(set(self.lengths)) < len(self.lengths):
            raise LoadgenError("lengths must be different numbers from 2")
        if not self.depths or not all(0 < depth <= 100 for depth in self.depths):
            raise LoadgenError("depths must be above 0 and at most 100, in percent of the layers")
        require_at_least(1, self, "repeats")
        require_at_least(0, self, "seed")


QUICK = ResumePlan(lengths=(128, 512), depths=(2.5, 50.0, 100.0), repeats=2)
"""About a minute for a small model on two cores."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A pause after `layer` of a session of `length` tokens."""

    length: int
    layer: int


def choose_layers(num_layers: int, depths: Sequence[float]) -> tuple[int, ...]:
    """The last layer that has run at each depth, from 0; fewer than there are depths in a model with few layers."""
    return tuple(sorted({max(1, math.ceil(depth * num_layers / 100)) - 1 for depth in depths}))


def depth_of(layer: int, num_layers: int) -> float:
    """Percent of the layers that have run when the model stands after `layer`."""
    return 100 * (layer + 1) / num_layers


def plan_cells(lengths: Sequence[int], layers: Sequence[int]) -> tuple[Cell, ...]:
    """All of them, in the order in which they are measured."""
    return tuple(Cell(length, layer) for length in lengths for layer in layers)


def checked_cells(lengths: Sequence[int], layers: Sequence[int]) -> tuple[Cell, ...]:
    """One cell for each length, at a layer that changes with the length: there the answers of all ways are to the same
    history in the first repeat, and can be compared.
    """
    return tuple(Cell(length, layers[place % len(layers)]) for place, length in enumerate(lengths))


def order_of_ways(ways: Sequence[Way], repeat: int, cell: int) -> tuple[Way, ...]:
    """The ways for one cell: each is first as often as the others, so that what drifts falls on all alike."""
    first = (repeat + cell) % len(ways)
    return (*ways[first:], *ways[:first])
