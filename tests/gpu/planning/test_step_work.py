"""What breakpoints may do in a step: bounded, and everybody's turn comes."""

from hypothesis import given
from hypothesis import strategies as st

from app.domain.values import SessionId
from app.gpu.planning.step_work import StepWork

MOST = 10
WORK = st.integers(1, 2 * MOST)


def sessions(count: int) -> list[SessionId]:
    return [SessionId(f"ses_{number}") for number in range(count)]


@given(works=st.lists(st.lists(WORK, min_size=1, max_size=4), min_size=1, max_size=6), data=st.data())
def test_a_step_has_no_more_than_it_may_and_each_row_comes_in_its_turn(
    works: list[list[int]], data: st.DataObject
) -> None:
    """Each session needs its numbers in turn, over and over; the order in which they ask changes from step to step."""
    budget, rows = StepWork(MOST), sessions(len(works))
    waited, done = dict.fromkeys(rows, 0), dict.fromkeys(rows, 0)
    for _ in range(30):
        budget.begin()
        taken = []
        for session in data.draw(st.permutations(rows)):
            needs = works[rows.index(session)]
            work = needs[done[session] % len(needs)]
            if budget.take(session, work):
                taken.append(work)
                waited[session] = 0
                done[session] += 1
            else:
                waited[session] += 1
        assert taken
        assert sum(taken) <= MOST or len(taken) == 1
        assert max(waited.values()) <= len(rows)


@given(needs=st.lists(WORK, min_size=1, max_size=20))
def test_a_row_that_comes_to_need_more_keeps_its_place(needs: list[int]) -> None:
    """Another session always asks first, for all of a step."""
    budget, (greedy, late) = StepWork(MOST), sessions(2)
    waited = 0
    for need in needs:
        budget.begin()
        budget.take(greedy, MOST)
        waited = 0 if budget.take(late, need) else waited + 1
        assert waited <= 2 * MOST


def test_nobody_waits_for_a_session_that_is_gone() -> None:
    budget, (first, gone, last) = StepWork(MOST), sessions(3)
    budget.begin()
    assert budget.take(first, MOST)
    assert not budget.take(gone, MOST)
    assert not budget.take(last, 1)
    budget.forget(gone)
    budget.begin()
    assert budget.take(first, MOST - 1)
    assert budget.take(last, 1)


def test_a_session_that_does_not_come_again_holds_up_one_step() -> None:
    budget, (first, away) = StepWork(MOST), sessions(2)
    budget.begin()
    assert budget.take(first, MOST)
    assert not budget.take(away, MOST)
    budget.begin()
    assert not budget.take(first, MOST)
    budget.begin()
    assert budget.take(first, MOST)


@given(needs=st.lists(WORK, min_size=2, max_size=8))
def test_nobody_waits_who_would_be_taken(needs: list[int]) -> None:
    budget, rows = StepWork(MOST), sessions(len(needs))
    for _ in range(3 * len(needs)):
        budget.begin()
        for session, need in zip(rows, needs, strict=True):
            waits = budget.waits(session)
            assert not (budget.take(session, need) and waits)


def test_a_row_without_work_waits_for_nobody() -> None:
    budget, (large, plain) = StepWork(MOST), sessions(2)
    budget.begin()
    assert budget.take(large, 2 * MOST)
    assert not budget.waits(plain)
