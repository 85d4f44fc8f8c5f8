"""What the experiment asks for, and what samples made by hand come to."""

from __future__ import annotations

from collections import Counter

import pytest

from loadgen.experiments.weights.findings import Findings, Sample, Way
from loadgen.experiments.weights.plan import Cell, order_of_ways
from loadgen.experiments.weights.report import judge
from loadgen.experiments.weights.summary import Measure, summarize
from loadgen.results.verdicts import Outcome, Verdict

ONE = Cell(1)
STREAMED_BYTES = 1000
PLAIN = 4000.0
"""Bytes a second of plain copies: those of a pass take a quarter of a second."""


def sample(
    way: Way, first_s: float, tokens_per_s: float, *, repeat: int = 0, cell: Cell = ONE, answer: str = "a"
) -> Sample:
    """What a way had."""
    bandwidth = None if way is Way.RESIDENT else STREAMED_BYTES * tokens_per_s / cell.batch
    return Sample(way, cell.batch, cell.cold, repeat, first_s, tokens_per_s, bandwidth, answer)


def plain(bytes_per_s: float = PLAIN, *, repeat: int = 0, cell: Cell = ONE) -> Sample:
    """Copies and nothing else."""
    return Sample(Way.PLAIN, cell.batch, cell.cold, repeat, bytes_per_s=bytes_per_s)


def findings(*samples: Sample, device: str = "cpu") -> Findings:
    """Of these samples."""
    return Findings(list(samples), streamed_bytes={Way.STREAMED: STREAMED_BYTES}, device=device)


def test_every_way_is_first_and_last_as_often_as_the_others() -> None:
    ways = tuple(Way)
    orders = [order_of_ways(ways, repeat, cell) for repeat in range(len(ways)) for cell in range(3)]
    for place in range(len(ways)):
        assert set(Counter(order[place] for order in orders).values()) == {3}


MANY = Cell(8)


def verdicts(found: Findings, *cells: Cell) -> list[Verdict]:
    chosen = cells or (ONE,)
    return list(judge(summarize(found, chosen), found, chosen))


def test_a_way_is_compared_within_a_repeat() -> None:
    """The second repeat is of a machine half as fast, and the third has nothing to compare with."""
    found = findings(
        *(
            sample(Way.STREAMED, first_s, rate, repeat=repeat)
            for repeat, first_s, rate in ((0, 1, 4), (1, 2, 2), (2, 9, 9))
        ),
        *(sample(Way.ACCELERATE, first_s, rate, repeat=repeat) for repeat, first_s, rate in ((0, 3, 2), (1, 6, 1))),
    )
    summary = summarize(found, [ONE])
    for measure, expected in ((Measure.FIRST, 3.0), (Measure.RATE, 2.0), (Measure.BANDWIDTH, 2.0)):
        ratio = summary.ratio(Way.ACCELERATE, ONE, measure)
        assert ratio is not None
        assert (ratio.median, ratio.low, ratio.high, ratio.count) == (expected, expected, expected, 2)
    assert summary.ratio(Way.DOUBLE_BUFFER, ONE, Measure.FIRST) is None
    assert summary.ratio(Way.ACCELERATE, MANY, Measure.FIRST) is None


@pytest.mark.parametrize(
    ("rates", "outcome"),
    [((3.6,), Outcome.MET), ((3.5,), Outcome.MISSED), ((3.5, 3.4, 3.9), Outcome.UNDECIDED), ((), Outcome.UNKNOWN)],
)
def test_bandwidth_is_held_against_plain_copies(rates: tuple[float, ...], outcome: Outcome) -> None:
    found = findings(
        *(sample(Way.STREAMED, 1, rate, repeat=repeat) for repeat, rate in enumerate(rates)),
        *(plain(repeat=repeat) for repeat in range(3)),
    )
    assert verdicts(found)[0].what == "bandwidth over that of plain copies, 1 session"
    assert verdicts(found)[0].outcome is outcome


@pytest.mark.parametrize(
    ("answers", "measured", "outcome"),
    [("ab", "2 of 2", Outcome.MET), ("ax", "1 of 2", Outcome.MISSED), ("a", "1 of 1", Outcome.MET)],
)
def test_both_servers_must_say_the_same(answers: str, measured: str, outcome: Outcome) -> None:
    found = findings(
        *(sample(Way.STREAMED, 1, 4, repeat=repeat, answer=answer) for repeat, answer in enumerate(answers)),
        *(sample(Way.RESIDENT, 1, 4, repeat=repeat, answer=answer) for repeat, answer in enumerate("ab")),
    )
    last = verdicts(found)[-1]
    assert (last.measured, last.outcome) == (measured, outcome)
