"""The log of interventions, against a list of edits for each position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.breakpoints import Edit, EditOp, Intervention, TensorData
from app.gpu.interventions import InterventionLog

POSITIONS = 12
Seen = list[tuple[int, Edit]]


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


def at(made: Intervention, position: int) -> tuple[int, Edit]:
    """What an intervention does to one position."""
    vector = made.edit.vector
    if vector is None:
        return made.boundary, made.edit
    row = position - made.first
    return made.boundary, Edit(made.edit.op, vector=TensorData("float32", (1, 1), vector.data[row * 4 : row * 4 + 4]))


def seen(made: list[Intervention], position: int) -> Seen:
    """The edits of one position in their order; those of different boundaries have none among each other."""
    found = [at(each, position) for each in made if each.first <= position < each.end]
    return sorted(found, key=lambda step: step[0])


@given(st.lists(interventions(), max_size=6))
def test_every_position_keeps_its_edits_in_their_order(made: list[Intervention]) -> None:
    log = InterventionLog(made)
    for position in range(POSITIONS):
        assert seen(log.within(0, POSITIONS), position) == seen(made, position)
        assert seen(log.within(position, position + 1), position) == seen(made, position)


@given(st.lists(interventions(), max_size=6), st.integers(0, POSITIONS))
def test_a_cut_forgets_what_came_after_it_and_nothing_else(made: list[Intervention], length: int) -> None:
    log = InterventionLog(made)
    log.truncate(length)
    for position in range(POSITIONS):
        assert seen(log.within(0, POSITIONS), position) == (seen(made, position) if position < length else [])


@given(st.lists(interventions(), max_size=4), st.lists(interventions(), max_size=4))
def test_one_position_has_one_fingerprint_for_the_same_edits_only(
    one: list[Intervention], other: list[Intervention]
) -> None:
    logs = InterventionLog(one), InterventionLog(other)
    for position in range(POSITIONS):
        fingerprints = [log.fingerprint(position, position + 1) for log in logs]
        assert (fingerprints[0] == fingerprints[1]) == (seen(one, position) == seen(other, position))


def test_nothing_done_has_no_fingerprint() -> None:
    log = InterventionLog([Intervention(3, 5, 1, Edit(EditOp.ABLATE))])
    assert log.fingerprint(0, 3) == b""
    assert log.fingerprint(5, 9) == b""
    assert log.fingerprint(0, 4) != b""


def test_steering_of_a_whole_turn_is_one_entry() -> None:
    log = InterventionLog()
    log.add(Intervention(0, 40, 3, Edit(EditOp.SCALE, factor=0.9)))
    for position in range(40, 104):
        log.add(Intervention(position, position + 1, 3, Edit(EditOp.SCALE, factor=0.9)))
    assert log.snapshot() == (Intervention(0, 104, 3, Edit(EditOp.SCALE, factor=0.9)),)
