"""The report as a page, with its figures."""

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.axes import Axes

from loadgen.experiments.resume_latency.findings import Way
from loadgen.experiments.resume_latency.report import ResumeReport, TargetReport
from loadgen.experiments.resume_latency.summary import Measure, Row
from loadgen.experiments.resume_latency.tables import tables
from loadgen.results.figures import INK, Figure, color_of
from loadgen.results.page import Page, Section
from loadgen.results.plots import Series, label_axes, level, lines

DEPTH = "depth of the pause, % of layers"
NAMES = {Way.RECOMPUTE: "recompute", Way.OFFLOAD: "hand-written", Way.DJINN: "Djinn"}
"""Short enough for a legend on a narrow page."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WORDS = {Measure.STANDING: "Until the model stands at the layer again", Measure.TOKEN: "Until the next token"}
CAPTION = (
    "Medians. A colour for each way, a marker for each length. Where Djinn's line is below that of a recompute of the "
    "same length, coming back is sooner than recomputing."
)


def figures(target: TargetReport) -> Iterator[Figure]:
    """For both measures: all ways, and what a recompute takes longer."""
    for measure in Measure:
        rows = [row for row in target.summary.rows if row.seconds(measure) is not None]
        if rows:
            yield Figure(
                f"{WORDS[measure]}: {target.server.name}", CAPTION, partial(_draw_ways, rows=rows, measure=measure)
            )
    for measure in Measure:
        series = _speed_ups(target, measure)
        if series:
            yield Figure(
                f"Recompute over Djinn, {measure.value}: {target.server.name}",
                "How many times as long a recompute takes, medians. Above the dashed line Djinn is sooner.",
                partial(_draw_speed_ups, series=series),
            )


def _draw_ways(axes: Axes, rows: Sequence[Row], measure: Measure) -> None:
    lengths = list(dict.fromkeys(row.length for row in rows))
    for number, way in enumerate(Way):
        for length, marker in zip(lengths, MARKERS, strict=False):
            points = [
                (row.depth, 1000 * spread.median)
                for row in rows
                if (row.way, row.length) == (way, length) and (spread := row.seconds(measure)) is not None
            ]
            if points:
                xs, ys = zip(*points, strict=True)
                axes.plot(xs, ys, color=color_of(number), marker=marker, markersize=4.5, linewidth=1.4)
    present = {row.way for row in rows}
    for number, way in enumerate(Way):
        if way in present:
            axes.plot([], [], color=color_of(number), label=NAMES[way])
    for length, marker in zip(lengths, MARKERS, strict=False):
        axes.plot([], [], color=INK, linestyle="", marker=marker, markersize=4.5, label=f"{length:,} tokens")
    label_axes(axes, DEPTH, "milliseconds", log_y=True)
    axes.set_xlim(0, 102)


def _speed_ups(target: TargetReport, measure: Measure) -> list[Series]:
    found = [each for each in target.summary.comparisons if (each.measure, each.way) == (measure, Way.RECOMPUTE)]
    return [
        Series(f"{length:,} tokens", [(each.depth, each.ratio.median) for each in found if each.length == length])
        for length in dict.fromkeys(each.length for each in found)
    ]


def _draw_speed_ups(axes: Axes, series: Sequence[Series]) -> None:
    lines(axes, series, DEPTH, "times as long", log_y=True, markers=True)
    level(axes, 1.0, "as long as Djinn")
    axes.set_xlim(0, 102)


TIMED = (
    Section(
        "Recompute: what is timed",
        "A fresh session is sent the whole history. Stands again: from the request until the answer that it is paused "
        "after the layer. Next token: another fresh session without a pause, from the request to the first token. "
        "Neither the opening of a session nor the arming of the breakpoint is on the clock; no prefix is in a cache.",
    ),
    Section(
        "Hand-written offload: what is timed",
        "A separate script, with one session and without HTTP. Stands again: it copies the KV that the layers up to "
        "the pause have from one buffer in host memory (pinned where there is CUDA) to one on the device, and the "
        "residual stream, until both have arrived. Next token: then Transformers takes the residual stream through the "
        "layers that are left.",
    ),
    Section(
        "Djinn: what is timed",
        "The paused session is in the host tier, and others have taken its place on the device. Stands again: from "
        "sending `ready` until the server, which is polled, says that all KV is on the device; the time in which the "
        "residual stream comes back is added, by the server's clock. Next token: from sending `resume`, "
        "unannounced, to the first token. All KV that the session has comes back, in blocks. "
        "Blocks of the pass that has paused have the layers that it has run.",
    ),
)


def make_page(report: ResumeReport) -> Page:
    """All that there is to see of a run."""
    plan = report.plan
    depths = ", ".join(f"{depth:g}" for depth in plan.depths)
    lead = (
        f"Sessions of {', '.join(f'{length:,}' for length in plan.lengths)} tokens of real text ({report.texts.name}), "
        f"paused at {depths} % of the layers, {plan.repeats} times in each way, in alternating order.",
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}.",
    )
    sections = [section for target in report.targets for section in _sections(target)]
    return Page("Coming back to where it was", lead, (*sections, *TIMED), report.command)


def _sections(target: TargetReport) -> tuple[Section, ...]:
    server, findings = target.server, target.findings
    text = [f"Started with {server.started}."] if server.started else []
    if findings.offload:
        text.append(f"The hand-written offload ran on {findings.offload}.")
    parted = {length: first for length, first in findings.passes.items() if first}
    if parted:
        shown = ", ".join(f"{first:,} of {length:,}" for length, first in parted.items())
        text.append(
            f"The server computes long histories in parts; only the last one pauses, and the positions before it "
            f"({shown} tokens) have KV of all layers in every way."
        )
    title = f"{server.name}: {server.url}"
    return (Section(title, " ".join(text), tuple(figures(target)), tuple(tables(target))),)
