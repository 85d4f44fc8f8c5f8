"""Whom sessions are offered to when a server gives all of them away: it ends, whatever the peers say."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from app.cluster.fleet import Replica, State
from app.cluster.load import Load
from app.cluster.moves.leaving.choice import MOST_REFUSALS, PATIENCE_S, TRIES, PeerChoice, Tried

ROOM = st.lists(st.integers(0, 12), min_size=1, max_size=3)


def _peers(count: int) -> list[Replica]:
    return [Replica(name, "http://h:1", State.READY, Load(1.0, 0)) for name in "abc"[:count]]


@given(ROOM, st.integers(1, 30), st.data())
def test_each_session_goes_or_stays_after_few_offers(room: list[int], count: int, data: st.DataObject) -> None:
    choice, peers, now = PeerChoice(), _peers(len(room)), 0.0
    left = {each.name: places for each, places in zip(peers, room, strict=True)}
    waiting = {number: Tried() for number in range(count)}
    offers, in_a_row, taken = Counter[tuple[int, str]](), Counter[str](), 0
    while waiting and not choice.are_full(peers):
        open_ = choice.open(peers, now)
        found = [(number, peer) for number, tried in waiting.items() if (peer := tried.best(open_)) is not None]
        if not found:
            hopeless = [number for number, tried in waiting.items() if choice.is_hopeless(peers, tried)]
            for number in hopeless:
                del waiting[number]
            now += PATIENCE_S
            continue
        number, peer = data.draw(st.sampled_from(found))
        offers[number, peer.name] += 1
        assert offers[number, peer.name] <= TRIES
        assert in_a_row[peer.name] < MOST_REFUSALS
        if left[peer.name]:
            left[peer.name] -= 1
            in_a_row[peer.name] = 0
            taken += 1
            choice.took(peer.name)
            del waiting[number]
        else:
            in_a_row[peer.name] += 1
            choice.refused(peer.name, waiting[number], now)
    assert taken == min(count, sum(room))


def test_a_peer_that_refuses_is_left_alone_for_a_while() -> None:
    choice, peers, tried = PeerChoice(), _peers(2), Tried()
    choice.refused("a", tried, now=10.0)
    assert [each.name for each in choice.open(peers, 10.0)] == ["b"]
    assert [each.name for each in choice.open(peers, 10.0 + PATIENCE_S)] == ["a", "b"]


def test_one_that_can_never_take_a_session_is_not_asked_again() -> None:
    choice, peers, tried = PeerChoice(), _peers(1), Tried()
    assert not choice.is_hopeless(peers, tried)
    choice.shunned("a", tried)
    assert tried.best(peers) is None
    assert choice.is_hopeless(peers, tried)
    assert not choice.is_hopeless([], Tried())  # somebody may come
