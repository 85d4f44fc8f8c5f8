"""How long agents are away between two turns."""

import argparse
import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, WithJsonSchema

from loadgen.errors import LoadgenError

MAX_SIGMA = 10.0
"""Far beyond what any agent does, and short of what overflows."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """Seconds drawn evenly from `low` to `high`. Raises `LoadgenError` if there are none."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < math.inf:
            raise LoadgenError(f"think time {self}: LOW:HIGH needs 0 <= LOW <= HIGH, in seconds")

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"

    def draw(self, rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
        """An array of `shape`, in seconds."""
        return rng.uniform(self.low, self.high, shape)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Seconds whose logarithm is normally distributed, with standard deviation `sigma` around that of `median`.

    Raises `LoadgenError` if a value is outside its range.
    """

    median: float
    sigma: float

    def __post_init__(self) -> None:
        if not (0 < self.median < math.inf and 0 <= self.sigma <= MAX_SIGMA):
            raise LoadgenError(
                f"think time {self}: lognormal:MEDIAN:SIGMA needs a MEDIAN above 0, in seconds, "
                f"and a SIGMA from 0 to {MAX_SIGMA:g}"
            )

    def __str__(self) -> str:
        return f"lognormal:{self.median:g}:{self.sigma:g}"

    def draw(self, rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
        """An array of `shape`, in seconds."""
        return self.median * np.exp(self.sigma * rng.standard_normal(shape))


ThinkTime = Uniform | LogNormal


def read_think(text: str) -> ThinkTime:
    """The same for an option. Raises `argparse.ArgumentTypeError`."""
    try:
        return parse_think(text)
    except LoadgenError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_think(text: str) -> ThinkTime:
    """Read `LOW:HIGH` or `lognormal:MEDIAN:SIGMA`. Raises `LoadgenError`."""
    kind, separator, rest = text.partition(":")
    lognormal = kind == "lognormal" and separator
    first, _, second = rest.partition(":") if lognormal else (kind, separator, rest)
    try:
        values = float(first), float(second)
    except ValueError:
        raise LoadgenError(f"think time must be LOW:HIGH or lognormal:MEDIAN:SIGMA, not {text!r}") from None
    return LogNormal(*values) if lognormal else Uniform(*values)


InfinityAsNull = Annotated[
    float,
    BeforeValidator(lambda value: math.inf if value is None else value),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}], "description": "null is infinite"}),
]
"""A float that may be infinite: written as null, which is read back as infinity."""
