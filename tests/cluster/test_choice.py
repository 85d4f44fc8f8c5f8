"""Which replica gets a new session, and whom sessions are offered to."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from app.cluster.claims import Load, Member, decode
from app.cluster.fleet import Fleet
from app.cluster.moves.draining import AT_A_LOOK
from tests.cluster.doors import Known, member
from tests.cluster.pair import PROMPT, pair
from tests.durability.restarting import generate, open_session
from tests.processes import metric
from tests.waiting import wait_until


def _fleet(here: str = "a", **loads: Load) -> tuple[Fleet, Known]:
    known = Known({name: replace(member(name, "http://h:1"), load=load) for name, load in loads.items()})
    return Fleet(here, lambda: known.members), known


def test_new_sessions_go_where_there_is_room_and_spread_until_the_next_word() -> None:
    older = decode(Member, '{"name": "a", "url": "", "journal": ""}')
    assert older.load == Load(0.0, 0), "it has not measured it yet"
    fleet, known = _fleet(a=Load(0.50, 0), b=Load(0.55, 9))
    assert [fleet.place().name for _ in range(6)] == ["b", "b", "b", "a", "b", "a"]
    known.members["b"] = replace(known.members["b"], load=Load(0.55, 9, 0.1))
    assert [fleet.place().name for _ in range(2)] == ["b", "b"]
    assert _fleet(a=Load(1, 5), b=Load(1, 4))[0].place().name == "b", "of equal room the less busy one"
    parked, _ = _fleet(a=Load(1, 0, host_free=0.4), b=Load(1, 0, host_free=0.6))
    assert parked.place().name == "b", "where all are parked the one with fewer"
    assert {_fleet(here, a=Load(1, 0), b=Load(1, 0))[0].place().name for here in ("a", "b")} == {"a", "b"}


def test_a_new_name_stays_where_it_is_asked_for_unless_there_is_clearly_more_room() -> None:
    for b, place in ((Load(0.6, 1, 0.6), "a"), (Load(0.61, 1), "b"), (Load(0.5, 1, 0.61), "b"), (Load(0.51, 0), "b")):
        assert _fleet(a=Load(0.5, 9, 0.5), b=b, c=Load(0.5, 9, 0.5))[0].place(is_named=True).name == place


def test_nothing_new_goes_to_a_replica_that_refuses_is_away_or_only_computes_prompts() -> None:
    fleet, known = _fleet(a=Load(0.9, 0), b=Load(0.1, 0), c=Load(0.8, 0))

    def say(name: str, **changed: Any) -> None:
        known.members[name] = replace(known.members[name], **changed)

    say("a", ready=False)
    say("c", left=True)
    assert {fleet.place().name for _ in range(5)} == {"b"}
    (b,) = [each for each in fleet if each.name == "b"]
    b.shun(60)
    b.shun(1e-9)  # a shorter time does not end a longer one
    assert fleet.place().name == "a"  # it says itself why not
    b.shun(0)
    assert fleet.place().name == "b"
    say("a", ready=True, load=Load(0.1, 0))
    say("c", left=False)
    assert fleet.place({"b"}).name == "a", "rather itself than a third"
    assert fleet.place({"a", "b", "c"}).name == "a", "which says itself why not"
    fleet, known = _fleet(a=Load(0.9, 0), b=Load(0.1, 9))
    say("a", role="prefill")
    assert {fleet.place().name for _ in range(5)} == {"b"}
    say("b", ready=False)
    assert fleet.place().name == "a", "nobody else takes any"


HOUR_MS = 3_600_000
MOST = 150
"""Sessions, of which a third fill the memory of the server."""
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
