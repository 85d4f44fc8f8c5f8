"""The log of interventions: its size, what it costs, and how it comes back from the journal."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.breakpoints import Edit, EditOp, Intervention, TensorData
from app.domain.errors import FieldOutOfRange
from app.domain.positions import Run, positions_of, runs_of
from app.gpu.state.interventions import MAX_RUNS, InterventionLog
from tests.gpu.kv.tiering import calls_of

POSITIONS = 12


def rows_of(count: int, seed: int) -> TensorData:
    """Another vector of one element for each of `count` positions."""
    return TensorData("float32", (count, 1), b"".join(bytes([seed, row, 0, 0]) for row in range(count)))


@st.composite
def interventions(draw: st.DrawFn) -> Intervention:
    first = draw(st.integers(0, POSITIONS - 1))
    end = draw(st.integers(first + 1, POSITIONS))
    boundary = draw(st.integers(1, 2))
    edit = Edit(EditOp.SCALE, factor=draw(st.sampled_from([0.5, 2.0])))
    if draw(st.booleans()):
        edit = Edit(EditOp.REPLACE, vector=rows_of(end - first, draw(st.integers(0, 1))))
        return Intervention(first, end, boundary, edit)
    chosen = draw(st.sets(st.integers(first, end - 1), min_size=1))
    return Intervention.at(runs_of(sorted(chosen)), boundary, edit)


def log_of(made: Iterable[Intervention]) -> InterventionLog:
    """A log that has been told of each."""
    log = InterventionLog()
    for each in made:
        log.add(each)
    return log


def test_an_entry_does_not_grow_for_ever() -> None:
    squares = [number * number for number in range(2 * MAX_RUNS)]
    log = log_of(Intervention(at, at + 1, 1, Edit(EditOp.ABLATE)) for at in squares)
    assert max(len(each.runs) for each in log.snapshot()) == MAX_RUNS
    assert [position for each in log.snapshot() for position in positions_of(each.runs)] == squares


@pytest.mark.parametrize("others", [0, 3])
def test_adding_and_copying_cost_the_same_however_many_there_are(others: int) -> None:
    """At each position one edit goes on, and `others` are made that are made nowhere else."""
    log = InterventionLog()

    def add(first: int) -> None:
        for step in range(first, first + 100):
            for factor in (-1.0, *(step * others + number for number in range(others))):
                log.add(Intervention(step, step + 1, 1, Edit(EditOp.SCALE, factor)))

    few = calls_of(partial(add, 0))
    for first in range(100, 2000, 100):
        add(first)
    assert calls_of(partial(add, 2000)) < 1.5 * few
    assert calls_of(log.copy) < 10 * len(log) + 100


@pytest.mark.parametrize("apart", [1, 3])
def test_an_edit_at_equal_distances_is_one_entry_however_many_there_are(apart: int) -> None:
    log = InterventionLog()
    for step in range(2000):
        for boundary in range(3):
            log.add(Intervention(step * apart, step * apart + 1, boundary, Edit(EditOp.SCALE, 0.5)))
    assert [each.runs for each in log.snapshot()] == [(Run(0, 1999 * apart + 1, apart),)] * 3


def test_a_session_has_at_most_a_few_thousand_edits() -> None:
    """So many are copied, cut and sent in milliseconds, for which all sessions wait."""
    log = log_of(Intervention(0, 1, 1, Edit(EditOp.SCALE, number)) for number in range(4096))
    log.check("breakpoints")
    with pytest.raises(FieldOutOfRange, match=r"breakpoints: .* with 4097 edits, .* from 0 to 4096"):
        log.check("breakpoints", more=1)


CHANGES = st.one_of(
    st.tuples(st.just("add"), interventions()),
    st.tuples(st.just("truncate"), st.integers(0, POSITIONS)),
    st.tuples(st.just("forget"), interventions()),
)


def change(log: InterventionLog, kind: str, what: Any) -> None:
    if kind == "forget":
        log.forget(what.boundary, what.first, what.end)
    else:
        getattr(log, kind)(what)


@given(st.lists(CHANGES, max_size=10))
def test_a_log_from_the_journal_goes_on_as_it_would_have(changes: list[tuple[str, Any]]) -> None:
    """It has the same entries and the same fingerprints, of blocks and of files: so KV on disk is found again."""
    log = InterventionLog()
    for kind, what in changes:
        loaded = InterventionLog(log.snapshot())
        change(log, kind, what)
        change(loaded, kind, what)
        assert loaded.snapshot() == log.snapshot()
        assert (loaded.end, loaded.tensor_bytes) == (log.end, log.tensor_bytes)
        spans = [(first, end) for end in range(POSITIONS + 1) for first in range(end)]
        found = {span: log.fingerprint(*span) for span in reversed(spans)}
        assert [loaded.fingerprint(*span) for span in spans] == [found[span] for span in spans]
