"""The figures as tables of text, for the terminal and for the page."""

from collections.abc import Iterator

from loadgen.experiments.resume_latency.findings import Way
from loadgen.experiments.resume_latency.plan import depth_of
from loadgen.experiments.resume_latency.report import TargetReport, from_layer, times
from loadgen.experiments.resume_latency.summary import Measure, Row
from loadgen.results.failures import failure_table
from loadgen.results.spread import in_words
from loadgen.results.tables import TextTable
from loadgen.results.verdicts import verdict_table

SPREAD = "Median, and from lowest to highest of the repeats."


def tables(target: TargetReport) -> Iterator[TextTable]:
    """The tables that have something in them, the targets met and missed first."""
    every = (
        verdict_table(target.verdicts),
        failure_table(target.findings.failures, interrupted=target.findings.interrupted),
        _crossings(target),
        *(_times(target, measure) for measure in Measure),
        *(_ratios(target, measure) for measure in Measure),
        _server(target),
    )
    return (table for table in every if table.rows)


def _crossings(target: TargetReport) -> TextTable:
    """A row for each length and measure that both ways were timed for."""
    rows: list[tuple[str, ...]] = []
    for crossing in target.summary.crossings:
        recompute, offload = (
            _range(target, crossing.length, crossing.measure, way) for way in (Way.RECOMPUTE, Way.OFFLOAD)
        )
        if recompute:
            first = crossing.measure.value if not rows or crossing.measure.value not in {row[0] for row in rows} else ""
            sooner = from_layer(crossing, target.num_layers)
            rows.append((first, f"{crossing.length:,}", sooner, recompute, offload))
    header = ("", "tokens", "sooner than a recompute", "recompute over Djinn", "Djinn over hand-written offload")
    note = (
        "By medians. Sooner: at every depth that was measured from that layer on. Over: how many times as long, from "
        "the depth at which it is lowest to the one at which it is highest."
    )
    return TextTable("What it comes to", header, rows, note)


def _range(target: TargetReport, length: int, measure: Measure, way: Way) -> str:
    """Over all depths; empty if there is none."""
    found = [
        each.ratio.median
        for each in target.summary.comparisons
        if (each.length, each.measure, each.way) == (length, measure, way)
    ]
    return f"{times(min(found))}–{times(max(found))}" if found else ""


def _times(target: TargetReport, measure: Measure) -> TextTable:
    found = {(row.length, row.layer, row.way): row for row in target.summary.rows}
    rows: list[tuple[str, ...]] = []
    for length in dict.fromkeys(row.length for row in target.summary.rows):
        for place, layer in enumerate(target.layers):
            cells = [_cell(found.get((length, layer, way)), measure) for way in Way]
            if any(cells):
                first = f"{length:,} tokens" if not rows or not place else ""
                rows.append((first, *_place(target, layer), *cells))
    title = (
        f"Milliseconds until the model {measure.value}"
        if measure is Measure.STANDING
        else "Milliseconds until the next token"
    )
    return TextTable(title, ("", "layer", "depth", *Way), rows, SPREAD)


def _ratios(target: TargetReport, measure: Measure) -> TextTable:
    found = {
        (each.length, each.layer, each.way): each.ratio
        for each in target.summary.comparisons
        if each.measure is measure
    }
    rows = []
    for length in dict.fromkeys(length for length, _, _ in found):
        for place, layer in enumerate(target.layers):
            cells = [in_words(found.get((length, layer, way)), times) for way in (Way.RECOMPUTE, Way.OFFLOAD)]
            if any(cells):
                rows.append((f"{length:,} tokens" if not place else "", *_place(target, layer), *cells))
    header = ("", "layer", "depth", "recompute over Djinn", "Djinn over hand-written offload")
    return TextTable(f"How many times as long, {measure.value}", header, rows, SPREAD + " Taken within each repeat.")


def _server(target: TargetReport) -> TextTable:
    rows = []
    lengths = list(dict.fromkeys(times.length for times in target.summary.server))
    for length in lengths:
        mine = [times for times in target.summary.server if times.length == length]
        for place, found in enumerate(mine):
            cells = [in_words(spread, _milliseconds) for spread in (found.dispatch_s, found.copy_s, found.checkpoint_s)]
            rows.append((f"{length:,} tokens" if not place else "", *_place(target, found.layer), *cells))
    note = (
        f"{SPREAD} Dispatch: the engine takes the resume. KV: the copy from the host tier. Residual stream: the "
        "checkpoint on its way back."
    )
    header = ("", "layer", "depth", "dispatch", "KV", "residual stream")
    return TextTable("By the server's own clocks, milliseconds of a resume from the host tier", header, rows, note)


def _place(target: TargetReport, layer: int) -> tuple[str, str]:
    return str(layer), f"{depth_of(layer, target.num_layers):.0f} %"


def _cell(row: Row | None, measure: Measure) -> str:
    return "" if row is None else in_words(row.seconds(measure), _milliseconds)


def _milliseconds(seconds: float) -> str:
    milliseconds = 1000 * seconds
    if milliseconds < 1:
        return f"{milliseconds:.3f}"
    return f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:,.0f}"
