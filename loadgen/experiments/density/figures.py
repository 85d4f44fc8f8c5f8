"""What an experiment found, as figures."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

from matplotlib.axes import Axes

from loadgen.experiments.density.curves import (
    MOVING,
    PARTS,
    REST,
    TIERS,
    Points,
    by_tier,
    completed,
    device_budget,
    device_bytes,
    in_flight,
    mean_parts,
    told_of_tiers,
)
from loadgen.experiments.density.report import Named
from loadgen.load.records import Run
from loadgen.results.figures import Figure
from loadgen.results.plots import Series, areas, bars, cdf, level, lines
from loadgen.results.text import MIB, milliseconds

SECONDS = "seconds since the start"


def figures(targets: Sequence[Named]) -> tuple[Figure, ...]:
    """The figures that have something in them, the most important first."""
    every = (_ttft(targets), _parts(targets), _tiers(targets), _bytes(targets), _course(targets))
    return tuple(chain.from_iterable(every))


def _ttft(targets: Sequence[Named]) -> Iterator[Figure]:
    samples = {target.name: [turn.ttft_s for turn in target.measured_turns if turn.turn > 0] for target in targets}
    if any(samples.values()):
        yield Figure(
            "Time to first token, resumed turns",
            "Share of the resumed turns of all repeats whose first token had come by then. Further left is faster.",
            lambda axes: cdf(axes, samples, "seconds", log=True),
        )


def _parts(targets: Sequence[Named]) -> Iterator[Figure]:
    found = {target.name: parts for target in targets if (parts := mean_parts(target.report.summary)) is not None}
    if not found:
        return
    heights = {part: [1000 * parts[part] for parts in found.values()] for part in (*PARTS, REST)}

    def draw(axes: Axes) -> None:
        bars(axes, list(found), heights, "milliseconds", stacked=True)
        for place, parts in enumerate(found.values()):
            total = sum(parts.values())
            axes.annotate(milliseconds(total), (place, 1000 * total), (0, 2), textcoords="offset points", ha="center")
        axes.set_ylim(top=1100 * max(sum(parts.values()) for parts in found.values()))

    yield Figure(
        "Where a resumed turn waits for its first token",
        "Mean of all resumed turns, in the parts that the server tells; targets that tell none are not shown.",
        draw,
    )


def _tiers(targets: Sequence[Named]) -> Iterator[Figure]:
    for target in targets:
        samples = told_of_tiers(target.shown_run) if target.shown_run is not None else []
        if samples:
            times = [sample.at_s for sample in samples]
            tiers = [by_tier(sample.sessions) for sample in samples]
            sessions = {tier: [float(counts[tier]) for counts in tiers] for tier in (*TIERS, MOVING)}
            yield Figure(
                f"Sessions per tier: {target.name}",
                "Sessions by where their KV is, while the server carries the load, in the first repeat.",
                partial(areas, xs=times, series=sessions, x_label=SECONDS, y_label="sessions"),
            )


def _bytes(targets: Sequence[Named]) -> Iterator[Figure]:
    series = _series(targets, device_bytes, 1 / MIB)
    if not series:
        return
    runs = (target.shown_run for target in targets)
    told = {budget for run in runs if run is not None and (budget := device_budget(run)) is not None}
    budgets = sorted({round(budget / MIB, 2) for budget in told})  # from shares with few digits: equal but for rounding

    def draw(axes: Axes) -> None:
        lines(axes, series, SECONDS, "MiB", steps=True)
        for budget in budgets:
            level(axes, budget, "room on the device")
        axes.set_ylim(bottom=0, top=1.05 * max(axes.get_ylim()[1], *budgets, 0.0))

    yield Figure(
        "KV on the device",
        "Bytes of KV that sessions hold there, and the room that there is, in the first repeat.",
        draw,
    )


def _course(targets: Sequence[Named]) -> Iterator[Figure]:
    if not any(target.shown_run is not None and target.shown_run.turns for target in targets):
        return
    done, under_way = _series(targets, completed), _series(targets, in_flight)
    yield Figure(
        "Turns completed",
        "Over time, in the first repeat. A line that lags behind the others is a server that cannot keep up.",
        lambda axes: lines(axes, done, SECONDS, "turns", steps=True),
    )
    yield Figure(
        "Turns in flight",
        "Sent and not yet over, in the first repeat; turns that failed are not counted.",
        lambda axes: lines(axes, under_way, SECONDS, "turns", steps=True),
    )


def _series(targets: Sequence[Named], curve: Callable[[Run], Points], scale: float = 1.0) -> list[Series]:
    """The curve of each target that has one, in the colour that the target has everywhere."""
    found = []
    for number, target in enumerate(targets):
        points = [] if target.shown_run is None else curve(target.shown_run)
        if points:
            found.append(Series(target.name, [(x, y * scale) for x, y in points], number))
    return found
