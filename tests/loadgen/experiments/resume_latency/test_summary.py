"""Crossings, ratios and verdicts of samples made by hand."""

from __future__ import annotations

import pytest

from loadgen.experiments.resume_latency.findings import Findings, Way
from loadgen.experiments.resume_latency.plan import Cell, plan_cells
from loadgen.experiments.resume_latency.report import TargetReport, judge
from loadgen.experiments.resume_latency.summary import Crossing, Measure, Summary, summarize
from loadgen.experiments.resume_latency.tables import tables
from loadgen.results.inputs import Server
from loadgen.results.verdicts import Outcome
from tests.loadgen.experiments.resume_latency.building import LAYERS, crossing_at_layer_2, sample

CELLS = plan_cells([64], range(LAYERS))
PLANNED = 3 * LAYERS * len(Way)


@pytest.fixture
def summary() -> Summary:
    return summarize(crossing_at_layer_2(), CELLS, LAYERS)


def test_the_crossing_is_the_layer_from_which_djinn_is_always_sooner(summary: Summary) -> None:
    assert summary.crossings == (Crossing(64, Measure.STANDING, 2), Crossing(64, Measure.TOKEN, 2))


def test_a_layer_above_at_which_it_is_not_sooner_undoes_the_crossing() -> None:
    findings = Findings(
        samples=[
            sample(way, layer, seconds, None)
            for layer, pair in enumerate(((2.0, 1.0), (2.0, 3.0), (3.0, 1.0)))
            for way, seconds in zip((Way.RECOMPUTE, Way.DJINN), pair, strict=True)
        ]
    )
    found = summarize(findings, plan_cells([64], range(3)), 3).crossings
    assert found == (Crossing(64, Measure.STANDING, 2), Crossing(64, Measure.TOKEN, None))


def test_ratios_are_taken_within_a_repeat() -> None:
    """Both are twice as slow in the second repeat: the ratio is the same, and has no spread."""
    findings = Findings(
        samples=[
            sample(way, 0, repeats * seconds, None, repeat=repeats)
            for repeats in (1, 2)
            for way, seconds in ((Way.RECOMPUTE, 0.6), (Way.DJINN, 0.3), (Way.OFFLOAD, 0.1))
        ]
    )
    recompute, offload = summarize(findings, [Cell(64, 0)], LAYERS).comparisons
    for found, way, ratio in ((recompute, Way.RECOMPUTE, 2.0), (offload, Way.OFFLOAD, 3.0)):
        assert (found.way, found.ratio.count) == (way, 2)
        assert (found.ratio.low, found.ratio.median, found.ratio.high) == pytest.approx((ratio, ratio, ratio))


def test_a_way_that_failed_leaves_the_others(summary: Summary) -> None:
    findings = crossing_at_layer_2()
    findings.samples = [one for one in findings.samples if one.way is not Way.OFFLOAD]
    found = summarize(findings, CELLS, LAYERS)
    assert found.crossings == summary.crossings
    assert {row.way for row in found.rows} == {Way.RECOMPUTE, Way.DJINN}
    assert found.agreements == ()
    outcomes = {verdict.what: verdict.outcome for verdict in judge(found, findings, PLANNED, LAYERS)}
    assert outcomes["next tokens that are those of Transformers"] is Outcome.UNKNOWN
    assert Outcome.MISSED in outcomes.values()


def test_nothing_measured_is_no_verdict() -> None:
    found = judge(summarize(Findings(), CELLS, LAYERS), Findings(), PLANNED, LAYERS)
    assert [verdict.outcome for verdict in found] == [Outcome.UNKNOWN, Outcome.UNKNOWN, Outcome.MISSED]
    assert found[-1].measured == "0 of 36"


def test_tokens_that_differ_are_seen() -> None:
    findings = Findings(samples=[sample(Way.DJINN, 0, 1.0, 2.0, token=7), sample(Way.OFFLOAD, 0, 1.0, 2.0, token=8)])
    found = summarize(findings, [Cell(64, 0)], LAYERS)
    _, tokens, _ = judge(found, findings, 2, LAYERS)
    assert (tokens.measured, tokens.outcome) == ("0 of 1", Outcome.MISSED)


def test_the_table_names_the_layer_and_both_ratios(summary: Summary) -> None:
    findings = crossing_at_layer_2()
    server = Server("djinn", "http://127.0.0.1:1", "djinn", None)
    report = TargetReport(server, LAYERS, tuple(range(LAYERS)), findings, summary, ())
    (table,) = (table for table in tables(report) if table.title == "What it comes to")
    assert table.rows[0] == ("stands again", "64", "from layer 2 on (75 % of depth)", "0.40–1.60", "5.0–5.0")
