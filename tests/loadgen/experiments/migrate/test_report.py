"""What is made of moves that were measured, or went wrong."""

from __future__ import annotations

import pytest

from loadgen.experiments.migrate.journey import FirstToken, Journey
from loadgen.experiments.migrate.page import make_page, tables
from loadgen.experiments.migrate.plan import MigratePlan
from loadgen.experiments.migrate.report import Findings, MigrateReport, summarize
from loadgen.results.failures import Failure
from loadgen.results.inputs import Server, Texts

SERVER = Server("A", "http://a", "djinn", None)


def journey(tokens: int, *, moved: tuple[int, ...] = (1, 2, 3), export_s: float = 0.25) -> Journey:
    """A move that takes `export_s` + 0.75 s, where computing anew takes 3 s."""
    return Journey(
        tokens=tokens,
        repeat=0,
        file_bytes=1000 * tokens,
        export_s=export_s,
        import_s=0.5,
        stayed=FirstToken(0.1, 6, (1, 2, 3)),
        moved=FirstToken(0.25, 6, moved),
        anew=FirstToken(3.0, tokens + 5, (7,)),
    )


def report(findings: Findings) -> MigrateReport:
    costs = summarize(findings.journeys)
    plan, texts = MigratePlan(), Texts("texts", "0" * 64)
    return MigrateReport(seed=0, plan=plan, texts=texts, origin=SERVER, goal=SERVER, findings=findings, costs=costs)


def test_costs_by_length() -> None:
    short, long = summarize([journey(200), journey(100, export_s=0.5), journey(100), journey(100, export_s=9.0)])
    assert (short.tokens, short.moves, long.tokens, long.moves) == (100, 3, 200, 1)
    assert (short.export_s, short.move_s, long.move_s) == (0.5, 1.25, 1.0)
    assert long.gain == 3.0


def test_an_answer_that_differs_is_no_success() -> None:
    found = report(Findings([journey(100), journey(100, moved=(1, 9, 3))]))
    (cost,) = found.costs
    assert (cost.equal, cost.same_tokens, cost.decoded_tokens) == (1, 3 + 1, 6)
    assert not found.succeeded
    (answers, *_) = tables(found)
    assert answers.rows[0][1:3] == ("1 of 2", "4 of 6")
    assert answers.rows[0][-1] == "DIFFERENT"


def test_an_answer_that_ends_early_differs() -> None:
    assert not journey(100, moved=(1, 2)).equal


def test_a_failure_and_an_interruption_are_no_success() -> None:
    assert report(Findings([journey(100)])).succeeded
    assert not report(Findings([journey(100)], [Failure("part", "Timeout", "silent")])).succeeded
    assert not report(Findings([journey(100)], interrupted=True)).succeeded


def test_a_run_in_which_nothing_arrived_has_a_page() -> None:
    page = make_page(report(Findings(failures=[Failure("100 tokens", "Unprocessable", "of another model")])))
    assert list(page.figures) == []
    assert [section.title for section in page.sections] == ["Servers", "Failures"]


@pytest.mark.parametrize("text", ["microseconds", "milliseconds"])
def test_units_are_in_the_titles(text: str) -> None:
    assert any(text in table.title for table in tables(report(Findings([journey(100)]))))
