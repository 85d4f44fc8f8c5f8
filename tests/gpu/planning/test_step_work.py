"""What breakpoints may do in a step: bounded, and everybody's turn comes."""

from hypothesis import given
from hypothesis import strategies as st

from app.domain.values import SessionId
from app.gpu.planning.step_work import StepWork

MOST = 10
TENANT = "one"
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
            if budget.take(session, TENANT, work):
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
        budget.take(greedy, TENANT, MOST)
        waited = 0 if budget.take(late, TENANT, need) else waited + 1
        assert waited <= 2 * MOST


def test_nobody_waits_for_a_session_that_is_gone() -> None:
    budget, (first, gone, last) = StepWork(MOST), sessions(3)
    budget.begin()
    assert budget.take(first, TENANT, MOST)
    assert not budget.take(gone, TENANT, MOST)
    assert not budget.take(last, TENANT, 1)
    budget.forget(gone)
    budget.begin()
    assert budget.take(first, TENANT, MOST - 1)
    assert budget.take(last, TENANT, 1)


def test_a_session_that_does_not_come_again_holds_up_one_step() -> None:
    budget, (first, away) = StepWork(MOST), sessions(2)
    budget.begin()
    assert budget.take(first, TENANT, MOST)
    assert not budget.take(away, TENANT, MOST)
    budget.begin()
    assert not budget.take(first, TENANT, MOST)
    budget.begin()
    assert budget.take(first, TENANT, MOST)


@given(needs=st.lists(WORK, min_size=2, max_size=8))
def test_nobody_waits_who_would_be_taken(needs: list[int]) -> None:
    budget, rows = StepWork(MOST), sessions(len(needs))
    for _ in range(3 * len(needs)):
        budget.begin()
        for session, need in zip(rows, needs, strict=True):
            waits = budget.waits(session)
            assert not (budget.take(session, TENANT, need) and waits)


def test_a_row_without_work_waits_for_nobody() -> None:
    budget, (large, plain) = StepWork(MOST), sessions(2)
    budget.begin()
    assert budget.take(large, TENANT, 2 * MOST)
    assert not budget.waits(plain)


@given(many=st.integers(1, 12), greedy_work=WORK, work=WORK)
def test_tenants_have_their_turns_however_many_sessions_another_has(many: int, greedy_work: int, work: int) -> None:
    budget, (own, *others) = StepWork(MOST), sessions(1 + many)
    had, greedy_had = 0, 0
    for _ in range(60):
        budget.begin()
        greedy_had += sum(greedy_work for session in others if budget.take(session, "greedy", greedy_work))
        had += work if budget.take(own, TENANT, work) else 0
    assert had >= min(60 * work, greedy_had) // 3 - 4 * MOST


@given(data=st.data())
def test_no_row_starves_whatever_its_tenant(data: st.DataObject) -> None:
    budget, rows = StepWork(MOST), sessions(6)
    tenants = {session: data.draw(st.sampled_from(["one", "two", "three"])) for session in rows}
    works = {session: data.draw(WORK) for session in rows}
    waited = dict.fromkeys(rows, 0)
    for _ in range(40):
        budget.begin()
        for session in data.draw(st.permutations(rows)):
            waited[session] = 0 if budget.take(session, tenants[session], works[session]) else waited[session] + 1
        assert max(waited.values()) <= len(rows) * 2 * MOST
