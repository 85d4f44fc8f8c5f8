"""Which replica gets a new session, and which names and URLs are none."""

from __future__ import annotations

import pytest

from app.cluster.fleet import Fleet, State
from app.cluster.load import Load
from app.domain.errors import FieldOutOfRange, ReplicaAway

URLS = {"a": "http://h:1", "b": "http://h:2/", "c": "http://[::1]:3"}


def _fleet(**loads: Load) -> Fleet:
    fleet = Fleet({name: URLS[name] for name in loads})
    for each in fleet:
        each.told(State.READY, loads[each.name])
    return fleet


def test_new_sessions_go_where_there_is_free_kv_and_spread_until_the_next_look() -> None:
    fleet = _fleet(a=Load(0.50, 0), b=Load(0.55, 9))
    assert [fleet.place().name for _ in range(6)] == ["b", "b", "b", "a", "b", "a"]


def test_of_equal_room_the_less_busy_replica_is_chosen() -> None:
    assert _fleet(a=Load(1, 5), b=Load(1, 4)).place().name == "b"


def test_where_all_sessions_are_parked_the_replica_with_fewer_of_them_is_chosen() -> None:
    assert _fleet(a=Load(1, 0, host_free=0.4), b=Load(1, 0, host_free=0.6)).place().name == "b"


def test_nothing_new_goes_to_a_replica_that_refuses_or_is_away() -> None:
    fleet = _fleet(a=Load(0.9, 0), b=Load(0.1, 0), c=Load(0.8, 0))
    states = {each.name: each for each in fleet}
    states["a"].told(State.REFUSES, None)
    states["c"].told(State.AWAY, None)
    assert {fleet.place().name for _ in range(5)} == {"b"}
    states["b"].told(State.AWAY, None)
    assert fleet.place().name == "a"  # it says itself why not
    states["a"].told(State.AWAY, None)
    with pytest.raises(ReplicaAway):
        fleet.place()


def test_one_that_only_computes_prompts_gets_new_sessions_only_if_nobody_else_does() -> None:
    fleet = _fleet(a=Load(0.9, 0, role="prefill"), b=Load(0.1, 9, role="decode"))
    assert {fleet.place().name for _ in range(5)} == {"b"}
    fleet.reachable("b").told(State.REFUSES, None)
    assert fleet.place().name == "a"


def test_a_replica_that_comes_back_elsewhere_is_looked_at_anew() -> None:
    fleet = _fleet(a=Load(1, 0), b=Load(1, 0))
    fleet.replace({"a": URLS["a"], "b": "http://h:9"})
    assert {each.name: (each.port, each.state) for each in fleet} == {"a": (1, State.READY), "b": (9, State.AWAY)}


@pytest.mark.parametrize(
    ("name", "url"),
    [("A", "http://h:1"), ("front", "http://h:1"), ("a", "https://h:1"), ("a", "h:1"), ("a", "http://h:x"), ("a", "")],
)
def test_what_is_no_replica_is_refused(name: str, url: str) -> None:
    with pytest.raises(FieldOutOfRange):
        Fleet({name: url})


@pytest.mark.parametrize("text", ["", "kv_free=x turns=1", "kv_free=1", "turns=1", "nonsense"])
def test_a_load_that_cannot_be_read_is_none(text: str) -> None:
    assert Load.of(text) is None
    assert Load.of(str(Load(0.25, 3, 0.5, "decode"))) == Load(0.25, 3, 0.5, "decode")
    assert Load.of("kv_free=0.25 turns=3") == Load(0.25, 3), "a server from before roles"
