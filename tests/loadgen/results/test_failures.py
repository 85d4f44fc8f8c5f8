"""What goes wrong in a part of an experiment, and how it is shown."""

from __future__ import annotations

import pytest

from loadgen.errors import LoadgenError
from loadgen.results.failures import Failure, failure_table, noting


def fail(error: Exception) -> None:
    raise error


def test_an_error_of_a_part_is_noted_and_a_bug_is_not() -> None:
    failures: list[Failure] = []
    with noting("links", failures):
        fail(LoadgenError("none"))
    with pytest.raises(ZeroDivisionError), noting("links", failures):
        fail(ZeroDivisionError())
    assert failures == [Failure("links", "LoadgenError", "none")]


def test_failures_that_are_alike_share_a_row() -> None:
    often, once = Failure("8 sessions", "Timeout", "too late"), Failure("1 session", "Timeout", "too late")
    table = failure_table([often, once, often], interrupted=True)
    assert [(row[0], row[-1]) for row in table.rows] == [("8 sessions", "2"), ("1 session", "1"), ("the run", "1")]
    assert {len(row) for row in table.rows} == {len(table.header)}


def test_a_run_without_failures_has_no_rows() -> None:
    assert not failure_table([], interrupted=False).rows
