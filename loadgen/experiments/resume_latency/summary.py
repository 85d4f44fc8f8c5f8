"""From samples to figures. Times in seconds."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loadgen.experiments.resume_latency.findings import Findings, Sample, Way
from loadgen.experiments.resume_latency.plan import Cell, checked_cells, depth_of
from loadgen.results.spread import Spread


class Measure(StrEnum):
    """What is waited for."""

    STANDING = "stands again"
    """The model is at the layer, with all KV in place."""
    TOKEN = "next token"


@dataclass(frozen=True, slots=True)
class Row:
    """One way back to one place. `depth` is in percent of the layers, `bytes` of KV."""

    length: int
    layer: int
    depth: float
    way: Way
    bytes: int
    standing_s: Spread | None
    token_s: Spread | None

    def seconds(self, measure: Measure) -> Spread | None:
        """How long it takes."""
        return self.standing_s if measure is Measure.STANDING else self.token_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two ways to one place, repeat by repeat: how many times as long as Djinn a recompute takes, and how many times as
    long as the hand-written offload Djinn takes.
    """

    length: int
    layer: int
    depth: float
    measure: Measure
    way: Way
    ratio: Spread


@dataclass(frozen=True, slots=True)
class Crossing:
    """From which layer on Djinn is sooner than a recompute, judged by medians; None if it never is to the end."""

    length: int
    measure: Measure
    layer: int | None


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Where the server says that the time of a resume went."""

    length: int
    layer: int
    dispatch_s: Spread | None
    copy_s: Spread | None
    checkpoint_s: Spread | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """The next token of one history: of Djinn's session that was away, and of Transformers."""

    length: int
    layer: int
    djinn: int
    transformers: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run of one target comes to. What could not be measured is missing."""

    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    crossings: tuple[Crossing, ...]
    server: tuple[ServerTimes, ...]
    agreements: tuple[Agreement, ...]


def summarize(findings: Findings, cells: Sequence[Cell], num_layers: int) -> Summary:
    """The figures of a run, complete or not."""
    rows = tuple(row for cell in cells for way in Way if (row := _row(findings, cell, way, num_layers)) is not None)
    comparisons = tuple(
        Comparison(cell.length, cell.layer, depth_of(cell.layer, num_layers), measure, way, ratio)
        for measure in Measure
        for cell in cells
        for way in (Way.RECOMPUTE, Way.OFFLOAD)
        if (ratio := Spread.of(_ratios(findings, cell, measure, way))) is not None
    )
    lengths, layers = _ordered(cell.length for cell in cells), _ordered(cell.layer for cell in cells)
    return Summary(
        rows,
        comparisons,
        tuple(_crossing(rows, length, measure) for measure in Measure for length in lengths),
        tuple(times for cell in cells if (times := _server(findings, cell)) is not None),
        tuple(_agreements(findings, checked_cells(lengths, layers))),
    )


def seconds_of(sample: Sample, measure: Measure) -> float | None:
    """How long the sample took; None where that was not measured."""
    return sample.standing_s if measure is Measure.STANDING else sample.token_s


def _of(findings: Findings, cell: Cell, way: Way) -> list[Sample]:
    return [s for s in findings.samples if (s.length, s.layer, s.way) == (cell.length, cell.layer, way)]


def _row(findings: Findings, cell: Cell, way: Way, num_layers: int) -> Row | None:
    samples = _of(findings, cell, way)
    if not samples:
        return None
    standing, token = (Spread.of(seconds_of(sample, measure) for sample in samples) for measure in Measure)
    depth = depth_of(cell.layer, num_layers)
    return Row(cell.length, cell.layer, depth, way, samples[0].bytes, standing, token)


def _ratios(findings: Findings, cell: Cell, measure: Measure, way: Way) -> Iterator[float]:
    """Of the repeats that have both."""
    mine, theirs = (
        {sample.repeat: seconds_of(sample, measure) for sample in _of(findings, cell, each)}
        for each in (Way.DJINN, way)
    )
    for repeat, seconds in mine.items():
        other = theirs.get(repeat)
        if seconds is not None and other is not None:
            yield other / seconds if way is Way.RECOMPUTE else seconds / other


def _crossing(rows: Sequence[Row], length: int, measure: Measure) -> Crossing:
    """From the last layer down, as long as Djinn is sooner."""
    found = {
        (row.layer, row.way): spread.median
        for row in rows
        if row.length == length and (spread := row.seconds(measure)) is not None
    }
    first: int | None = None
    for layer in sorted({layer for layer, _ in found}, reverse=True):
        djinn, recompute = found.get((layer, Way.DJINN)), found.get((layer, Way.RECOMPUTE))
        if djinn is None or recompute is None or djinn >= recompute:
            break
        first = layer
    return Crossing(length, measure, first)


def _server(findings: Findings, cell: Cell) -> ServerTimes | None:
    splits = [sample.split for sample in _of(findings, cell, Way.DJINN) if sample.split is not None]
    if not splits:
        return None
    return ServerTimes(
        cell.length,
        cell.layer,
        Spread.of(split.dispatch_s for split in splits),
        Spread.of(split.copy_s for split in splits),
        Spread.of(split.checkpoint_s for split in splits),
    )


def _agreements(findings: Findings, cells: Sequence[Cell]) -> Iterator[Agreement]:
    for cell in cells:
        djinn, offload = (
            [s.token_id for s in _of(findings, cell, way) if s.repeat == 0 and s.token_id is not None]
            for way in (Way.DJINN, Way.OFFLOAD)
        )
        if djinn and offload:
            yield Agreement(cell.length, cell.layer, djinn[0], offload[0])


def _ordered(values: Iterable[int]) -> list[int]:
    """Each once, in the order in which they come first."""
    return list(dict.fromkeys(values))
