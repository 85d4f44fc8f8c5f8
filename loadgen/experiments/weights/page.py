"""All files of a run: the page with its figures, and every sample as CSV."""

import csv
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from loadgen.experiments.weights.findings import Way
from loadgen.experiments.weights.page_cache import PERIOD_S
from loadgen.experiments.weights.report import WeightsReport
from loadgen.experiments.weights.summary import Measure
from loadgen.experiments.weights.tables import MEASURES, choice_in_words, tables
from loadgen.results.figures import Figure
from loadgen.results.page import Page, Section, write_outputs
from loadgen.results.plots import Series, bars, lines
from loadgen.results.text import in_bytes

FACTORS = {Measure.FIRST: 1e3, Measure.RATE: 1.0, Measure.BANDWIDTH: 1e-9}
UNITS = {Measure.FIRST: "milliseconds", Measure.RATE: "tokens/s", Measure.BANDWIDTH: "GB/s"}
TITLES = {
    Measure.BANDWIDTH: "Bandwidth of the weights",
    Measure.FIRST: "Time to the first token",
    Measure.RATE: "Tokens per second",
}
"""In the order in which they are shown."""

ROOM = 1.2
"""Over the largest value, for what is written beside points."""


def figures(report: WeightsReport) -> Iterator[Figure]:
    """What there is: of a comparison a drawing of each measure, of a sweep one of both sides of the choice."""
    if report.chunks:
        caption = "One session; medians. Each point is a size of copies: up and to the left is better."
        yield Figure("Bandwidth against time to first token", caption, partial(_draw_chunks, report=report))
    for measure, title in TITLES.items():
        series = _series(report, measure)
        if any(value is not None for values in series.values() for value in values):
            caption = f"{MEASURES[measure][0]}; medians."
            yield Figure(title, caption, partial(_draw, report=report, measure=measure, series=series))


def _series(report: WeightsReport, measure: Measure) -> dict[str, list[float | None]]:
    """Of each way, by cell; None where there is none. A way has the same colour in each figure."""
    _, figure, _ = MEASURES[measure]
    found = {(row.way, row.cell): spread.median for row in report.summary.rows if (spread := figure(row)) is not None}
    factor = FACTORS[measure]
    return {
        way.value: [None if (value := found.get((way, cell))) is None else factor * value for cell in report.plan.cells]
        for way in Way
    }


def _draw(axes: Axes, report: WeightsReport, measure: Measure, series: dict[str, list[float | None]]) -> None:
    bars(axes, [str(cell) for cell in report.plan.cells], series, UNITS[measure])


def _draw_chunks(axes: Axes, report: WeightsReport) -> None:
    points = [(1e3 * row.first_s.median, row.bytes_per_s.median / 1e9) for row in report.chunks]
    lines(axes, [Series("Djinn", points)], "time to the first token, milliseconds", "GB/s", markers=True)
    axes.set_xlim(0, ROOM * max(first for first, _ in points))
    axes.set_ylim(0, ROOM * max(bandwidth for _, bandwidth in points))
    for point, row in zip(points, report.chunks, strict=True):
        axes.annotate(in_bytes(row.chunk_bytes), point, textcoords="offset points", xytext=(4, 4), fontsize=9)


TIMED = (
    Section(
        "What is timed",
        "All prompts of a batch are sent at once. First token: until the last session has its first one; opening the "
        "sessions is not on the clock. Tokens per second: from then on until one session has its last. Bandwidth: what "
        "a pass needs of the weights and the device does not keep, times passes per second in that time. The "
        "sessions of a batch share out the same number of prompt tokens, so that all batches compute as much before "
        "their first tokens. Nothing of any prompt is in a cache.",
    ),
    Section(
        "What it is compared with",
        "All have the same prompts and the same budget, and run in turn in one run; only Djinn is asked over HTTP. "
        "Plain copies: one thread reads what the double buffer streams in a pass into two buffers in turn, over and "
        "over (on CUDA: copies it from pinned memory), and does nothing else. Double buffer: a decoder written by hand "
        "for one static batch, with two buffers of which one is filled while the other is computed with; the rest of "
        "the budget keeps whole layers, evenly spread. Accelerate: Transformers' generation, its offload.",
    ),
)
COLD = Section(
    "Cold",
    f"While a cold sample is taken, all files of weights are dropped from the page cache every {PERIOD_S:g} s, so that "
    "every pass reads from the disk.",
)


def make_page(report: WeightsReport) -> Page:
    """All that there is to see of a run."""
    plan, model = report.plan, report.model
    lead = (
        f"{model.name} in {model.dtype}, {in_bytes(model.bytes.total)} of weights, of which the device may have "
        f"{in_bytes(model.budget_bytes)}: {model.bytes.total / model.budget_bytes:.1f} times less. "
        f"{plan.prompt:,} tokens of prompt in a batch ({report.texts.name}), {plan.tokens} generated for each session, "
        f"{plan.repeats} times in each way, in alternating order.",
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}.",
    )
    started = " ".join(f"{server.name}: {server.started}." for server in report.servers)
    facts = " ".join(f"{fact}." for fact in report.findings.facts)
    chosen = () if report.choice is None else (Section("The size to choose", choice_in_words(report.choice)),)
    found = Section("", "", tuple(figures(report)), tuple(tables(report)))
    explained = (*TIMED, *((COLD,) if plan.cold else ()), Section("Servers and programs", f"{started} {facts}"))
    return Page("A model larger than the device", lead, (*chosen, found, *explained), report.command)


COLUMNS = ("way", "batch", "cold", "chunk_bytes", "repeat", "first_s", "tokens_per_s", "bytes_per_s", "answer")
"""As in `Sample` and `ChunkSample`. What a sample does not have is empty."""


def write_csv(report: WeightsReport, path: Path) -> Path:
    """Write a new file with a header and a line per sample, in order of time; returns `path`. Raises OSError."""
    with path.open("x", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(asdict(sample) | {"cold": int(sample.cold)} for sample in report.findings.samples)
        writer.writerows(asdict(sample) for sample in report.findings.chunks)
    return path


def write_weights(report: WeightsReport, folder: Path) -> list[Path]:
    """Write weights-TIME.json, .html, .csv and -FIGURE.png; returns their paths. Raises OSError."""
    written = write_outputs(report, make_page(report), folder)
    return [*written, write_csv(report, written[0].with_suffix(".csv"))]
