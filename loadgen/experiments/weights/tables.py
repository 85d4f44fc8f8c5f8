"""The figures as tables of text, for the terminal and for the page."""

from collections.abc import Callable, Iterator

from loadgen.experiments.weights.chunks import NEAR_BEST, Choice
from loadgen.experiments.weights.findings import Way
from loadgen.experiments.weights.report import WeightsReport, in_ratio
from loadgen.experiments.weights.summary import Measure, Row
from loadgen.results.failures import failure_table
from loadgen.results.spread import Spread, in_words
from loadgen.results.tables import Mark, TextTable
from loadgen.results.text import in_bytes, milliseconds, three_digits
from loadgen.results.verdicts import verdict_table

SPREAD = "Median, and from lowest to highest of the repeats."
CHOSEN = "chosen"

Write = Callable[[float], str]


def in_gigabytes(bytes_per_s: float) -> str:
    """In 10^9 bytes a second."""
    return f"{bytes_per_s / 1e9:.2f}"


MEASURES: dict[Measure, tuple[str, Callable[[Row], Spread | None], Write]] = {
    Measure.FIRST: ("Milliseconds until every session has its first token", lambda row: row.first_s, milliseconds),
    Measure.RATE: ("Tokens per second, of all sessions together", lambda row: row.tokens_per_s, three_digits),
    Measure.BANDWIDTH: ("Weights that come to the device, GB/s", lambda row: row.bytes_per_s, in_gigabytes),
}
"""Title, figure, and how it is written."""


def tables(report: WeightsReport) -> Iterator[TextTable]:
    """The tables that have something in them, the targets met and missed first."""
    every = (
        verdict_table(report.verdicts),
        failure_table(report.findings.failures, interrupted=report.interrupted),
        _chunks(report),
        *(_figures(report, measure) for measure in Measure),
        *(_comparisons(report, measure) for measure in Measure),
        _over_pass(report),
        _answers(report),
        _streamed(report),
    )
    return (table for table in every if table.rows)


def choice_in_words(choice: Choice) -> str:
    """Which size is chosen, and why."""
    return (
        f"{in_bytes(choice.chunk_bytes)}: of the sizes with at least {NEAR_BEST:.0%} of the best bandwidth (it has "
        f"{choice.share_of_best:.1%}) the one with the earliest first token."
    )


def _figures(report: WeightsReport, measure: Measure) -> TextTable:
    title, figure, write = MEASURES[measure]
    found = {(row.way, row.cell): figure(row) for row in report.summary.rows}
    cells = report.plan.cells
    rows = [(way.value, *(in_words(found.get((way, cell)), write) for cell in cells)) for way in Way]
    return TextTable(title, ("", *map(str, cells)), [row for row in rows if any(row[1:])], SPREAD)


def _comparisons(report: WeightsReport, measure: Measure) -> TextTable:
    cells, ratio = report.plan.cells, report.summary.ratio
    found = [(way, [ratio(way, cell, measure) for cell in cells]) for way in Way]
    rows = [(way.value, *map(in_ratio, ratios)) for way, ratios in found if any(ratios)]
    title = f"How many times as good streamed Djinn is, {measure.value}"
    note = f"{SPREAD} Taken within each repeat; above 1 Djinn is ahead."
    return TextTable(title, ("than", *map(str, cells)), rows, note)


def _over_pass(report: WeightsReport) -> TextTable:
    rows = [(str(each.cell), in_ratio(each.ratio)) for each in report.summary.over_pass]
    return TextTable("First token over one pass of plain copies", ("", f"{Way.STREAMED}"), rows, SPREAD)


def _answers(report: WeightsReport) -> TextTable:
    found = {(each.way, each.cell): f"{each.same} of {each.compared}" for each in report.summary.agreements}
    cells = [cell for cell in report.plan.cells if not cell.cold]
    rows = [(way.value, *(found.get((way, cell), "") for cell in cells)) for way in Way]
    note = "Whole batches. Who adds in another order rounds in another way, and close calls go the other way then."
    title = f"Answers that are those of {Way.RESIDENT}"
    return TextTable(title, ("", *map(str, cells)), [row for row in rows if any(row[1:])], note)


def _streamed(report: WeightsReport) -> TextTable:
    streamed, counted = report.findings.streamed_bytes, report.findings.counted_bytes
    rows = [(way.value, in_bytes(streamed[way])) for way in Way if way in streamed]
    note = "What a pass needs and the device does not keep."
    if counted is not None:
        note += f" By its own count, over the passes of one turn, Djinn streamed {in_bytes(counted)} in each."
    return TextTable("Weights streamed in a pass", ("", "bytes"), rows, note)


def _chunks(report: WeightsReport) -> TextTable:
    choice = report.choice
    rows = [
        (
            in_bytes(row.chunk_bytes),
            in_words(row.bytes_per_s, in_gigabytes),
            in_words(row.first_s, milliseconds),
            in_words(row.tokens_per_s, three_digits),
            CHOSEN if choice is not None and choice.chunk_bytes == row.chunk_bytes else "",
        )
        for row in report.chunks
    ]
    note = SPREAD if choice is None else f"{SPREAD} {choice_in_words(choice)}"
    header = ("copies of", "GB/s", "first token, ms", "tokens/s", "")
    return TextTable("Size of copies, one session", header, rows, note, marks={CHOSEN: Mark.GOOD})
