"""What a server's work costs, as it was measured, and how long a step takes by that."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import fmean
from typing import Any

from loadgen.errors import LoadgenError, require_at_least

Points = tuple[tuple[int, float], ...]
"""Seconds by a number of tokens, ascending in it."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The measured costs of one server.

    `decode_s` is the time per token of so many sessions that decode at once. `prompt_s` is the time of a step with so
    many tokens of prompts. `first_byte_s` is what the first token of a turn takes beside its steps, and `opening_s`
    what the first turn of a session takes more. Rates are in bytes per second; None for one that was not measured.
    `context` is the length in tokens of the histories meanwhile.

    Raises `LoadgenError` if a value is outside its range.
    """

    decode_s: Points
    prompt_s: Points
    first_byte_s: float
    opening_s: float
    bytes_per_token: int
    out_bytes_per_s: float
    in_bytes_per_s: float
    to_disk_bytes_per_s: float | None = None
    from_disk_bytes_per_s: float | None = None
    context: int = 0

    def __post_init__(self) -> None:
        require_at_least(0, self, "first_byte_s", "opening_s", "bytes_per_token", "context")
        for name in ("decode_s", "prompt_s"):
            points: Points = getattr(self, name)
            if not points or any(later[0] <= earlier[0] for earlier, later in pairwise(((0, 0.0), *points))):
                raise LoadgenError(f"{name} needs points at ascending numbers above 0")
            if any(seconds < 0 for _, seconds in points):
                raise LoadgenError(f"{name} has a time below 0")
        for name in ("out_bytes_per_s", "in_bytes_per_s", "to_disk_bytes_per_s", "from_disk_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise LoadgenError(f"{name} must be above 0")


def mean_of(measured: Sequence[Costs]) -> Costs:
    """The mean of several measurements at the same numbers of tokens, each value on its own."""
    if len(measured) == 1:
        return measured[0]
    means: dict[str, Any] = {}
    for field in fields(Costs):
        values = [getattr(each, field.name) for each in measured]
        if isinstance(values[0], tuple):
            means[field.name] = tuple(
                (points[0][0], fmean(s for _, s in points)) for points in zip(*values, strict=True)
            )
        elif None in values:
            means[field.name] = None
        else:
            means[field.name] = type(values[0])(fmean(values))
    return Costs(**means)


class StepTimes:
    """How long steps take, from a table: the simulation asks for millions of them."""

    def __init__(self, costs: Costs, most_rows: int, most_tokens: int) -> None:
        """`most_rows` decode at once, beside prompts in a step of at most `most_tokens` in all."""
        self.decode = _table(costs.decode_s, most_rows)
        self._prompt = _table(costs.prompt_s, most_tokens)

    def mixed(self, rows: int, prompt_tokens: int) -> float:
        """Seconds of a step. Rows that decode read the weights anyway; prompts beside them cost what they add."""
        if not prompt_tokens:
            return self.decode[rows]
        if not rows:
            return self._prompt[prompt_tokens]
        return self.decode[rows] + max(0.0, self._prompt[rows + prompt_tokens] - self._prompt[rows])


def _table(points: Points, most: int) -> list[float]:
    """Seconds at 0 to `most`, on lines between the points; before the first the time is that of the first."""
    return [0.0, *(_at(points, number) for number in range(1, most + 1))]


def _at(points: Sequence[tuple[int, float]], number: int) -> float:
    first, *rest = points
    if number <= first[0] or not rest:
        return first[1] if number <= first[0] else first[1] * number / first[0]
    after = next((place for place, (at, _) in enumerate(rest, 1) if at >= number), len(points) - 1)
    (left, low), (right, high) = points[after - 1], points[after]
    return max(0.0, low + (high - low) * (number - left) / (right - left))
