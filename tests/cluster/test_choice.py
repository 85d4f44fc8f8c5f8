"""Which replica gets a new session, whom sessions are offered to, and what the directory remembers."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cluster import table as tables
from app.cluster.directory import name_key
from app.cluster.fleet import Fleet, Replica, State
from app.cluster.load import Load
from app.cluster.moves.leaving.balance import AT_A_LOOK, EASED, FULL, Need, roomier
from app.cluster.moves.leaving.choice import MOST_REFUSALS, PATIENCE_S, TRIES, PeerChoice, Tried
from app.cluster.table import Table
from app.domain.errors import DirectoryAway, FieldOutOfRange, ReplicaAway
from tests.cluster.pair import PROMPT, pair
from tests.durability.restarting import generate, open_session
from tests.processes import metric
from tests.waiting import wait_until

URLS = {"a": "http://h:1", "b": "http://h:2/", "c": "http://[::1]:3"}


def _fleet(**loads: Load) -> Fleet:
    fleet = Fleet({name: URLS[name] for name in loads})
    for each in fleet:
        each.told(State.READY, loads[each.name])
    return fleet


def test_new_sessions_go_where_there_is_room_and_spread_until_the_next_look() -> None:
    fleet = _fleet(a=Load(0.50, 0), b=Load(0.55, 9))
    assert [fleet.place().name for _ in range(6)] == ["b", "b", "b", "a", "b", "a"]
    assert _fleet(a=Load(1, 5), b=Load(1, 4)).place().name == "b", "of equal room the less busy one"
    parked = _fleet(a=Load(1, 0, host_free=0.4), b=Load(1, 0, host_free=0.6))
    assert parked.place().name == "b", "where all are parked the one with fewer"
    fleet.replace({"a": URLS["a"], "b": "http://h:9"})
    assert {each.name: (each.port, each.state) for each in fleet} == {"a": (1, State.READY), "b": (9, State.AWAY)}


def test_nothing_new_goes_to_a_replica_that_refuses_is_away_or_only_computes_prompts() -> None:
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
    fleet = _fleet(a=Load(0.9, 0, role="prefill"), b=Load(0.1, 9, role="decode"))
    assert {fleet.place().name for _ in range(5)} == {"b"}
    fleet.reachable("b").told(State.REFUSES, None)
    assert fleet.place().name == "a", "nobody else takes any"


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


ROOM = st.lists(st.integers(0, 12), min_size=1, max_size=3)


def _peers(count: int) -> list[Replica]:
    return [Replica(name, "http://h:1", State.READY, Load(1.0, 0)) for name in "abc"[:count]]


@given(ROOM, st.integers(1, 30), st.data())
def test_each_session_goes_or_stays_after_few_offers(room: list[int], count: int, data: st.DataObject) -> None:
    choice, peers, now = PeerChoice(), _peers(len(room)), 0.0
    left = {each.name: places for each, places in zip(peers, room, strict=True)}
    waiting = {number: Tried() for number in range(count)}
    offers, in_a_row = Counter[tuple[int, str]](), Counter[str]()
    while waiting and not choice.are_full(peers):
        open_ = choice.open(peers, now)
        found = [(number, peer) for number, tried in waiting.items() if (peer := tried.best(open_)) is not None]
        if not found:
            waiting = {number: tried for number, tried in waiting.items() if not choice.is_hopeless(peers, tried)}
            now += PATIENCE_S
            continue
        number, peer = data.draw(st.sampled_from(found))
        offers[number, peer.name] += 1
        assert offers[number, peer.name] <= TRIES
        assert in_a_row[peer.name] < MOST_REFUSALS
        if left[peer.name]:
            left[peer.name] -= 1
            in_a_row[peer.name] = 0
            choice.took(peer.name)
            del waiting[number]
        else:
            in_a_row[peer.name] += 1
            choice.refused(peer.name, waiting[number], now)
    assert sum(room) - sum(left.values()) == min(count, sum(room))


FREE = st.floats(0, 1)
LOADS = st.builds(Load, FREE, st.integers(0, 9), FREE)
HOUR_MS = 3_600_000
MOST = 150
"""Sessions, of which a third fill the memory of the server."""


def _peer(name: str, load: Load) -> Replica:
    return Replica(name, "http://h:1", State.READY, load)


@given(LOADS, LOADS, st.floats(0, 0.1))
def test_what_goes_would_not_come_back(own: Load, other: Load, part: float) -> None:
    if not Need().look(own) or roomier(own, [_peer("b", other)]) is None:
        return
    ours = Load(own.kv_free, 0, min(1.0, own.host_free + part))
    theirs = Load(other.kv_free, 0, max(0.0, other.host_free - part))
    assert not (Need().look(theirs) and roomier(theirs, [_peer("a", ours)]))


def test_a_server_goes_on_until_it_is_eased() -> None:
    need, between = Need(), (FULL + EASED) / 2
    tight, eased = Load(0.0, 0, FULL / 2), Load(EASED, 0, 0.0)
    found = [need.look(each) for each in (Load(0.0, 0, between), tight, Load(0.0, 0, between), eased, eased)]
    assert found == [False, True, True, False, False]


def test_the_peer_with_the_most_room_is_chosen_if_it_has_clearly_more() -> None:
    own = Load(0.0, 0, 0.05)
    some, more, alike = Load(0.1, 0, 0.5), Load(0.0, 0, 0.6), Load(0.9, 0, 0.25)
    best = roomier(own, [_peer("b", some), _peer("c", more), _peer("d", alike)])
    assert best is not None
    assert best.name == "c"
    assert roomier(own, [_peer("d", alike), Replica("e", "http://h:1")]) is None


MOVED = 'djinn_sessions_moved_total{reason="balance"}'


def test_a_full_server_hands_over_what_returns_last(tmp_path: Path) -> None:
    small = ("--kv-device", "1MiB", "--kv-host", "1MiB")
    with pair(tmp_path, flags={"a": small}) as servers:
        a, b = servers.a, servers.b
        silent, late = list[str](), list[str]()
        for number in range(MOST):
            session = open_session(a)
            generate(a, session, [number + 1, *PROMPT], max_tokens=1)
            (late if number % 2 else silent).append(session)
            if number % 2:
                signal = {"phase": "io_wait", "resume_in_ms": HOUR_MS}
                a.post(f"/v1/sessions/{session}/phase", json=signal).raise_for_status()
            if number % 10 == 9 and metric(a, MOVED):
                break
        wait_until(lambda: metric(a, MOVED) >= AT_A_LOOK)
        went = [session for session in late if a.get(f"/v1/sessions/{session}").status_code in (421, 409)]
        assert went
        assert all(a.get(f"/v1/sessions/{session}").status_code == 200 for session in silent)
        wait_until(lambda: b.get(f"/v1/sessions/{went[0]}").status_code == 200)
        assert generate(b, went[0], [9])["usage"]["cached_tokens"] == len(PROMPT) + 1
        assert metric(b, MOVED) == 0


async def test_the_first_to_bind_a_name_wins_and_a_move_overrules(tmp_path: Path) -> None:
    table = Table(tmp_path / "there")
    key = name_key("tenant", "agent 1")
    assert await table.bind(key, "a") == "a"
    assert await table.bind(key, "b") == "a"
    await table.put(key, "b")
    assert await table.find(key) == "b"
    assert await table.find(name_key(None, "agent 1")) is None
    shutil.copytree(tmp_path / "there", tmp_path / "crashed")  # nothing was closed
    assert await Table(tmp_path / "crashed").find(key) == "b"


async def test_names_without_end_push_out_those_that_nobody_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST", 3)
    table = Table(tmp_path)
    for number in range(5):
        await table.bind(name_key(None, str(number)), "a")
    assert [await table.find(name_key(None, str(number))) for number in range(5)] == [None, None, "a", "a", "a"]
    table.close()
    assert len(Table(tmp_path)) == 3


@pytest.mark.long
def test_a_folder_that_another_front_door_uses_is_refused(tmp_path: Path) -> None:
    table = Table(tmp_path)
    with pytest.raises(DirectoryAway):
        Table(tmp_path)
    table.close()


async def test_a_folder_and_its_file_are_their_owners_alone(tmp_path: Path) -> None:
    Table(tmp_path / "state" / "cluster").close()
    made = [tmp_path / "state", tmp_path / "state" / "cluster", *(tmp_path / "state" / "cluster").iterdir()]
    assert len(made) > 2
    assert [each.name for each in made if each.stat().st_mode & 0o077] == []
