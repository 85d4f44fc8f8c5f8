"""The figures of one target."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from loadgen.experiments.kv.codecs import Compression
from loadgen.experiments.kv.fp8 import Fp8Error
from loadgen.experiments.kv.links import GB, Link
from loadgen.experiments.kv.payoff import Payoff, weigh
from loadgen.experiments.kv.report import Findings, TargetReport
from loadgen.experiments.kv.structure import Structure
from loadgen.results.figures import Figure, color_of
from loadgen.results.plots import Series, label_axes, level, lines
from loadgen.results.text import MIB

SPEEDS = tuple(float(speed) for speed in np.geomspace(0.01, 1000, 61))
"""Of links, in GB/s."""
DRAWN_TOKENS = 8192
SHORTEST_BAR = 3
"""A logarithmic axis has no zero: the shortest bar ends at so many times where all begin."""


def growth_figure(target: TargetReport, structure: Structure) -> Figure:
    """KV of one session, beside what the tiers hold."""

    def draw(axes: Axes) -> None:
        series = [Series("one session", [(row.tokens, row.bytes / MIB) for row in target.growth])]
        for name, size in (("device", structure.device_bytes), ("host", structure.host_bytes)):
            if size:
                room = [(target.growth[end].tokens, size / MIB) for end in (0, -1)]
                series.append(Series(f"room on the {name}", room))
        lines(axes, series, "tokens", "MiB", log_x=True, log_y=True)

    caption = f"{structure.bytes_per_token:,} bytes a token, in blocks of {structure.block_tokens} tokens."
    return Figure("KV of a session as it grows", caption, draw)


def transfer_figure(target: TargetReport, structure: Structure) -> Figure:
    """How long one session takes over each link."""

    def draw(axes: Axes) -> None:
        size = structure.session_bytes(DRAWN_TOKENS)
        for number, (kind, measured) in enumerate((("nominal speed", False), ("measured speed", True))):
            times = {link.name: 1000 * link.seconds(size) for link in target.links if link.measured is measured}
            axes.barh(list(times), list(times.values()), label=kind, color=color_of(number))
        fastest = min(link.seconds(size) for link in target.links)
        axes.set_xlim(left=1000 * fastest / SHORTEST_BAR)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        label_axes(axes, "milliseconds", "", log_x=True)

    caption = f"{DRAWN_TOKENS:,} tokens: bytes over speed, on a logarithmic scale."
    return Figure("Time to move a session", caption, draw)


def payoff_figures(findings: Findings) -> Iterator[Figure]:
    """How much faster packing makes links of any speed, both ways of doing it."""
    yield Figure(
        "Packing, one step after the other",
        "Above 1, to pack, send and unpack is faster than to send the KV as it is.",
        partial(_draw_gain, findings.compressions, lambda payoff: payoff.in_turn_s),
    )
    yield Figure(
        "Packing, pipelined",
        "The same where pieces are packed, sent and unpacked at once, and the slowest of the three decides.",
        partial(_draw_gain, findings.compressions, lambda payoff: payoff.pipelined_s),
    )


def _draw_gain(compressions: list[Compression], seconds: Callable[[Payoff], float], axes: Axes) -> None:
    series = []
    for found in compressions:
        payoffs = weigh([Link(f"{speed:g}", speed * GB) for speed in SPEEDS], [found])
        points = [(speed, payoff.plain_s / seconds(payoff)) for speed, payoff in zip(SPEEDS, payoffs, strict=True)]
        series.append(Series(found.codec, points))
    lines(axes, series, "speed of the link, GB/s", "times faster", log_x=True, log_y=True)
    level(axes, 1.0, "as it is")
    axes.set_ylim(bottom=0.01)


def fp8_figure(error: Fp8Error) -> Figure:
    """What fp8 loses, layer by layer."""

    def draw(axes: Axes) -> None:
        series = [
            Series(name, [(layer, 100 * found) for layer, found in enumerate(half.layers)])
            for name, half in (("keys", error.keys), ("values", error.values))
        ]
        lines(axes, series, "layer", "relative error, %", markers=True)
        axes.margins(y=0.1)

    caption = "Length of the error over length of the values, over all tokens and heads of a layer."
    return Figure("What fp8 loses, layer by layer", caption, draw)
