"""From samples to figures. Times in seconds, sizes in bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loadgen.experiments.weights.findings import Findings, Sample, Way
from loadgen.experiments.weights.plan import Cell
from loadgen.results.spread import Spread


class Measure(StrEnum):
    """What is compared."""

    FIRST = "first token"
    RATE = "tokens/s"
    BANDWIDTH = "bandwidth"


@dataclass(frozen=True, slots=True)
class Row:
    """One way with one batch."""

    way: Way
    cell: Cell
    first_s: Spread | None
    tokens_per_s: Spread | None
    bytes_per_s: Spread | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times as good as another way streamed Djinn is, repeat by repeat: above 1 it is ahead."""

    beside: Way
    cell: Cell
    measure: Measure
    ratio: Spread


@dataclass(frozen=True, slots=True)
class OverPass:
    """Streamed Djinn's time to the first token over that of plain copies of what it streams in a pass."""

    cell: Cell
    ratio: Spread


@dataclass(frozen=True, slots=True)
class Agreement:
    """In how many of the repeats that have both a way said the same as Djinn with all weights on the device."""

    way: Way
    cell: Cell
    same: int
    compared: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a comparison comes to. What could not be measured is missing."""

    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    over_pass: tuple[OverPass, ...]
    agreements: tuple[Agreement, ...]

    def ratio(self, beside: Way, cell: Cell, measure: Measure) -> Spread | None:
        """How many times as good as that way."""
        wanted = (beside, cell, measure)
        return next((each.ratio for each in self.comparisons if (each.beside, each.cell, each.measure) == wanted), None)


def summarize(findings: Findings, cells: Sequence[Cell]) -> Summary:
    """The figures of a run, complete or not."""
    found = _Samples(findings.samples)
    return Summary(
        tuple(row for cell in cells for way in Way if (row := _row(found, way, cell)) is not None),
        tuple(
            Comparison(way, cell, measure, ratio)
            for measure in Measure
            for cell in cells
            for way in Way
            if way is not Way.STREAMED
            if (ratio := Spread.of(_ratio(own, other, measure) for own, other in found.pairs(Way.STREAMED, way, cell)))
        ),
        tuple(over for cell in cells if (over := _over_pass(found, cell, findings)) is not None),
        tuple(each for cell in cells for way in Way if (each := _agreement(found, way, cell)).compared),
    )


def value_of(sample: Sample, measure: Measure) -> float | None:
    """What the sample has of it."""
    return {
        Measure.FIRST: sample.first_s,
        Measure.RATE: sample.tokens_per_s,
        Measure.BANDWIDTH: sample.bytes_per_s,
    }[measure]


class _Samples:
    """By way, cell and repeat."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._all = {(each.way, Cell(each.batch, each.cold), each.repeat): each for each in samples}

    def of(self, way: Way, cell: Cell) -> dict[int, Sample]:
        """By repeat."""
        return {repeat: each for (one, place, repeat), each in self._all.items() if (one, place) == (way, cell)}

    def pairs(self, first: Way, second: Way, cell: Cell) -> Iterator[tuple[Sample, Sample]]:
        """Of the repeats that have both."""
        others = self.of(second, cell)
        return ((each, others[repeat]) for repeat, each in self.of(first, cell).items() if repeat in others)


def _row(found: _Samples, way: Way, cell: Cell) -> Row | None:
    samples = found.of(way, cell).values()
    if not samples:
        return None
    return Row(way, cell, *(Spread.of(value_of(sample, measure) for sample in samples) for measure in Measure))


def _ratio(own: Sample, other: Sample, measure: Measure) -> float | None:
    mine, theirs = value_of(own, measure), value_of(other, measure)
    if mine is None or theirs is None:
        return None
    return theirs / mine if measure is Measure.FIRST else mine / theirs


def _over_pass(found: _Samples, cell: Cell, findings: Findings) -> OverPass | None:
    streamed = findings.streamed_bytes.get(Way.STREAMED)
    if streamed is None:
        return None
    ratio = Spread.of(
        own.first_s * plain.bytes_per_s / streamed
        for own, plain in found.pairs(Way.STREAMED, Way.PLAIN, cell)
        if own.first_s is not None and plain.bytes_per_s is not None
    )
    return None if ratio is None else OverPass(cell, ratio)


def _agreement(found: _Samples, way: Way, cell: Cell) -> Agreement:
    pairs = [] if way is Way.RESIDENT else list(found.pairs(way, Way.RESIDENT, cell))
    answers = [(own.answer, other.answer) for own, other in pairs if own.answer is not None]
    return Agreement(way, cell, sum(own == other for own, other in answers), len(answers))
