"""What the experiment does, and what one of its samples is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from loadgen.errors import LoadgenError, require_at_least
from loadgen.plans import option


class Way(StrEnum):
    """How the model comes to stand where it was."""

    RECOMPUTE = "recompute"
    """A fresh session is sent the whole history, and computes it up to the layer."""
    OFFLOAD = "hand-written offload"
    """A script copies the KV from host memory back to where attention reads it, and the residual stream."""
    DJINN = "Djinn"
    """The paused session is called back from the host tier."""


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """How much is measured: a pause at each of `depths`, in percent of the model's layers, of sessions of each of
    `lengths` tokens, `repeats` times in every way.

    Raises `LoadgenError` if a value is outside its range.
    """

    lengths: tuple[int, ...] = option((256, 512, 1024, 2048), "tokens of the sessions", quick=(128, 512))
    depths: tuple[float, ...] = option(
        (2.5, 25.0, 50.0, 75.0, 100.0), "where to pause, in %% of the layers", quick=(2.5, 50.0, 100.0)
    )
    repeats: int = option(5, "samples of each way and place", quick=2)
    seed: int = option(0, "of texts")

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 2 or len(set(self.lengths)) < len(self.lengths):
            raise LoadgenError("lengths must be different numbers from 2")
        if not self.depths or not all(0 < depth <= 100 for depth in self.depths):
            raise LoadgenError("depths must be above 0 and at most 100, in percent of the layers")
        require_at_least(1, self, "repeats")
        require_at_least(0, self, "seed")


@dataclass(frozen=True, slots=True)
class Cell:
    """A pause after `layer` of a session of `length` tokens."""

    length: int
    layer: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One way back to the cell. Times in seconds.

    `standing_s`: until the model stands there with all KV in place. `token_s`: from the start until the next token
    `token_id`, which the hand-written offload does not have without a model. `bytes`: of KV that were brought back, or
    recomputed. The rest is what the server tells of a resume from the host tier: the dispatch of the command, the copy
    of the KV, and the way back of the residual stream. None where it does not tell.
    """

    way: Way
    cell: Cell
    repeat: int
    standing_s: float
    token_s: float | None
    token_id: int | None
    bytes: int
    dispatch_s: float | None = None
    copy_s: float | None = None
    checkpoint_s: float | None = None


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
