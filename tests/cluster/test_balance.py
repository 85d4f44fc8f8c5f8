"""A full server hands sessions that rest to one with room, and none goes back and forth."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from hypothesis import given
from hypothesis import strategies as st

from app.cluster.fleet import Replica, State
from app.cluster.load import Load
from app.cluster.moves.leaving.balance import AT_A_LOOK, EASED, FULL, Need, roomier
from tests.cluster.front.doors import wait_until
from tests.cluster.pair import PROMPT, generate, open_session, pair

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


def _moved(http: httpx.Client) -> int:
    text = http.get("/metrics").text
    return int(float(re.findall(r'djinn_sessions_moved_total\{reason="balance"\} (\S+)', text)[0]))


def test_a_full_server_hands_over_what_returns_last(tmp_path: Path) -> None:
    small = ("--kv-device", "1MiB", "--kv-host", "1MiB")
    with pair(tmp_path, flags={"a": small}) as servers:
        a, b = servers.clients["a"], servers.clients["b"]
        silent: list[str] = []
        late: list[str] = []
        for number in range(MOST):
            session = open_session(a)
            generate(a, session, [number + 1, *PROMPT], max_tokens=1)
            (late if number % 2 else silent).append(session)
            if number % 2:
                signal = {"phase": "io_wait", "resume_in_ms": HOUR_MS}
                a.post(f"/v1/sessions/{session}/phase", json=signal).raise_for_status()
            if number % 10 == 9 and _moved(a):
                break
        wait_until(lambda: _moved(a) >= AT_A_LOOK)
        went = [session for session in late if a.get(f"/v1/sessions/{session}").status_code in (421, 409)]
        assert went
        assert all(a.get(f"/v1/sessions/{session}").status_code == 200 for session in silent)
        assert generate(b, _one_of(b, went), [9])["usage"]["cached_tokens"] == len(PROMPT) + 1
        assert _moved(b) == 0


def _one_of(http: httpx.Client, sessions: list[str]) -> str:
    """One of them that the server has by now."""
    found: list[str] = []

    def look() -> bool:
        found.extend(each for each in sessions if http.get(f"/v1/sessions/{each}").status_code == 200)
        return bool(found)

    wait_until(look)
    return found[0]
