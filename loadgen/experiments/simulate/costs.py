"""What a server's work costs, as it was measured, and how long a step takes by that."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import fmean
from typing import Any

from loadgen.errors import LoadgenError, require_at_least

Points = tuple[tuple[int, float], ...]
"""Seconds by a number of tokens or sessions, ascending in it."""
Samples = tuple[tuple[int, tuple[float, ...]], ...]
"""By a number of tokens or sessions, ascending in it: what was found each time, ascending."""
SOON = 1e-9
"""Of a step: what rounding may make of a whole number."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The measured costs of one server.

    `decode_s` is the time of a step in which so many sessions decode, and `decoded` how many tokens turns have of it:
    more than one where drafts are right. `prompt_s` is the time of a step with so many tokens of prompts. Both are
    medians. `prompt_ratios` are single times of a number of tokens over their median: those of long prompts are nearer
    to it. `decode_ratios` are those of a turn's mean step, of all numbers of sessions together, ascending.
    `first_byte_s` is what the first token of a turn takes beside its steps, and `opening_s` what the first turn of a
    session takes more. Rates are in bytes per second; None for one that was not measured. `context` is the length in
    tokens of the histories meanwhile.

    Raises `LoadgenError` if a value is outside its range.
    """

    decode_s: Points
    decoded: Samples
    prompt_s: Points
    first_byte_s: float
    opening_s: float
    bytes_per_token: int
    out_bytes_per_s: float
    in_bytes_per_s: float
    to_disk_bytes_per_s: float | None = None
    from_disk_bytes_per_s: float | None = None
    context: int = 0
    decode_ratios: tuple[float, ...] = (1.0,)
    prompt_ratios: Samples = ((1, (1.0,)),)

    def __post_init__(self) -> None:
        require_at_least(0, self, "first_byte_s", "opening_s", "bytes_per_token", "context")
        for name in ("decode_s", "decoded", "prompt_s", "prompt_ratios"):
            numbers = [number for number, _ in getattr(self, name)]
            if not numbers or any(later <= earlier for earlier, later in pairwise((0, *numbers))):
                raise LoadgenError(f"{name} needs points at ascending numbers above 0")
        if any(seconds < 0 for _, seconds in (*self.decode_s, *self.prompt_s)):
            raise LoadgenError("decode_s or prompt_s has a time below 0")
        if any(not turns or min(turns) < 1 for _, turns in self.decoded):
            raise LoadgenError("decoded needs turns, with at least one token of a step")
        for name, ratios in (
            ("decode_ratios", self.decode_ratios),
            *(("prompt_ratios", each) for _, each in self.prompt_ratios),
        ):
            if not ratios or not all(ratio >= 0 for ratio in ratios):  # also where one is no number
                raise LoadgenError(f"{name} needs numbers from 0 on")
        for name in ("out_bytes_per_s", "in_bytes_per_s", "to_disk_bytes_per_s", "from_disk_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise LoadgenError(f"{name} must be above 0")


def mean_of(measured: Sequence[Costs]) -> Costs:
    """The mean of several measurements at the same numbers of tokens, each value on its own. All samples are kept."""
    if len(measured) == 1:
        return measured[0]
    means: dict[str, Any] = {}
    for field in fields(Costs):
        values = [getattr(each, field.name) for each in measured]
        if field.name == "decode_ratios":
            means[field.name] = tuple(sorted(sum(values, ())))
        elif isinstance(values[0], tuple):
            joined = zip(*values, strict=True)
            means[field.name] = tuple((points[0][0], _mean([value for _, value in points])) for points in joined)
        elif None in values:
            means[field.name] = None
        else:
            means[field.name] = type(values[0])(fmean(values))
    return Costs(**means)


def _mean(values: list[Any]) -> Any:
    """Of times; of samples all are kept."""
    return tuple(sorted(sum(values, ()))) if isinstance(values[0], tuple) else fmean(values)


class StepTimes:
    """How long steps take, from a table: the simulation asks for millions of them."""

    def __init__(self, costs: Costs, most_rows: int, most_tokens: int) -> None:
        """`most_rows` decode at once, beside prompts in a step of at most `most_tokens` in all."""
        self._decode = _table(costs.decode_s, most_rows)
        self._prompt = _table(costs.prompt_s, most_tokens)
        self._decoded = [_at_most(costs.decoded, rows) for rows in range(most_rows + 1)]
        self._decode_ratios = costs.decode_ratios
        self._prompt_ratios = [_nearest(costs.prompt_ratios, tokens) for tokens in range(most_tokens + 1)]

    def mixed(self, rows: int, prompt_tokens: int, luck: float) -> float:
        """Seconds of a step. Prompts and rows that decode share no work: each takes as long as alone. `luck`, from 0 to
        below 1, is the step's place among the measured ones, from the fastest to the slowest. It is one for both, as a
        machine that is slow is so for all that it does.

        Measured in one run on two cores: 65 tokens beside 0, 1, 3 and 8 rows took 84, 94, 101 and 115 ms, and steps of
        1, 3 and 8 rows without prompts 11, 16 and 36 ms.
        """
        decode, prompt = self._decode_ratios, self._prompt_ratios[prompt_tokens]
        decode_s = self._decode[rows] * decode[int(luck * len(decode))]
        return decode_s + self._prompt[prompt_tokens] * prompt[int(luck * len(prompt))]

    def needed(self, rows: int, tokens: int, luck: float) -> int:
        """Steps in which a turn that is one of `rows` decodes `tokens`. `luck`, from 0 to below 1: its place among the
        measured turns.
        """
        turns = self._decoded[rows]
        return math.ceil(tokens / turns[int(luck * len(turns))] - SOON)


def _nearest(samples: Samples, number: int) -> tuple[float, ...]:
    """Those of the measured number that is the nearest."""
    return min(samples, key=lambda each: abs(each[0] - number))[1]


def _at_most(decoded: Samples, rows: int) -> tuple[float, ...]:
    """Turns of the largest measured number of sessions that is no more than `rows`, or of the smallest."""
    return next((turns for sessions, turns in reversed(decoded) if sessions <= rows), decoded[0][1])


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
