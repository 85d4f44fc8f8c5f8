"""What log-probabilities may take together, and what a tenant leaves to others."""

from __future__ import annotations

import pytest

from app.domain.errors import FieldOutOfRange, LogprobsFull
from app.sessions.charges.logprob_room import BYTES_EACH, LogprobRoom

MOST = 100


@pytest.fixture
def room() -> LogprobRoom:
    return LogprobRoom(MOST * BYTES_EACH)


def has_room(room: LogprobRoom, owner: str | None, count: int) -> bool:
    try:
        room.check(owner, count)
    except LogprobsFull:
        return False
    return True


def test_one_call_may_have_all_of_it(room: LogprobRoom) -> None:
    room.check("ada", MOST)
    room.take("ada", MOST)
    assert not has_room(room, "ada", 1)
    assert not has_room(room, "bob", 1)
    room.give("ada", MOST)
    room.check("bob", MOST)


def test_a_tenant_with_several_calls_leaves_as_much_to_others(room: LogprobRoom) -> None:
    while has_room(room, "ada", 10):
        room.take("ada", 10)
    assert has_room(room, "bob", 50)
    assert not has_room(room, "bob", 51)


def test_without_tenants_nobody_leaves_any(room: LogprobRoom) -> None:
    for _ in range(MOST // 10):
        room.check(None, 10)
        room.take(None, 10)
    assert not has_room(room, None, 1)


def test_calls_without_log_probabilities_need_no_room(room: LogprobRoom) -> None:
    room.take("ada", MOST)
    room.check("bob", 0)


def test_what_never_fits_is_refused_for_good(room: LogprobRoom) -> None:
    with pytest.raises(FieldOutOfRange, match="at most 100 fit max_logprobs_bytes") as refused:
        room.check("ada", MOST + 1)
    assert refused.value.param == "logprobs"
