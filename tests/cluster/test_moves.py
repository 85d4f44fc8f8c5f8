"""A session that moves to another server and back is the same session, even if a server dies meanwhile."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from client import Conflict, Djinn
from tests.cluster.pair import DRAWN, GREEDY, PROMPT, Chain, Pair, code, named, pair, sdk, status, used_session
from tests.cluster.traps import PLACES, lose_engine, set_trap
from tests.durability.restarting import generate, open_session
from tests.processes import until_ready
from tests.waiting import wait_until


def view(http: httpx.Client, session: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/sessions/{session}").raise_for_status().json()
    return found


@pytest.mark.parametrize(("sampling", "phase"), [(DRAWN, None), (GREEDY, "io_wait"), (DRAWN, "idle")])
def test_it_says_what_it_would_have_said(servers: Pair, sampling: dict[str, Any], phase: str | None) -> None:
    a, b = servers.a, servers.b
    stays, moves = open_session(a), open_session(a, metadata={"who": "me"}, ttl_s=1000)
    said = {session: [generate(a, session, PROMPT, **sampling)["token_ids"]] for session in (stays, moves)}
    before = view(a, moves)
    if phase is not None:
        a.post(f"/v1/sessions/{moves}/phase", json={"phase": phase}).raise_for_status()
    gone = servers.moved(moves)
    tokens = len(PROMPT) + 8
    assert (gone["id"], gone["replica"], gone["url"]) == (moves, "b", servers.urls["b"])
    assert (gone["tokens"], gone["tokens_with_kv"]) == (tokens, tokens - 1)
    assert gone["bytes"] > 0
    there = view(b, moves)
    kept = ("metadata", "created_at", "tokens", "state", "forked_from")
    assert {name: there[name] for name in kept} == {name: before[name] for name in kept}
    assert there["phase"] == (phase or before["phase"])
    assert there["kv"]["tier"] in ("host", "to_disk", "disk")
    turn = generate(b, moves, [9], **sampling)
    assert turn["usage"]["cached_tokens"] == tokens - 1
    said[moves].append(turn["token_ids"])
    servers.moved(moves, "b", "a")
    said[moves].append(generate(a, moves, [11], **sampling)["token_ids"])
    for token in (9, 11):
        said[stays].append(generate(a, stays, [token], **sampling)["token_ids"])
    assert said[moves] == said[stays]
    assert view(a, moves)["usage"]["completion_tokens"] == 24
    assert view(a, moves)["usage"]["tokens_recomputed"] == 0
    past = [each["kind"] for each in a.get(f"/v1/sessions/{moves}/timeline").json()["data"]]
    assert [each for each in past if each not in ("moved", "phase", "turn")] == ["arrived", "departed", "opened"]


def test_a_paused_turn_goes_on_there(servers: Pair) -> None:
    a, b = servers.a, servers.b
    ends = []
    for moves in (False, True):
        session = open_session(a)
        steer = {"layer": 0, "action": "edit", "edits": [{"op": "scale", "factor": 1.5}]}
        a.post(f"/v1/sessions/{session}/breakpoints", json=steer).raise_for_status()
        generate(a, session, PROMPT[:20])
        stop = {"layer": 2, "action": "pause", "when": {"pass": "decode", "position": 72}, "timeout_s": 500}
        a.post(f"/v1/sessions/{session}/breakpoints", json=stop).raise_for_status()
        turn = generate(a, session, PROMPT, max_tokens=12, **DRAWN)
        assert turn["status"] == "paused"
        edits = [{"op": "add", "factor": 0.5, "vector": [0.25] * 64}]
        home = a
        if moves:
            before = a.get(f"/v1/sessions/{session}").json()["checkpoint"]
            gone = servers.moved(session)
            assert gone["tokens_with_kv"] >= len(PROMPT)
            home = b
            after = b.get(f"/v1/sessions/{session}").json()["checkpoint"]
            for name in ("layer", "first", "end", "shape", "expires_at"):
                assert after[name] == before[name], name
        resumed = home.post(f"/v1/sessions/{session}/resume", json={"edits": edits}).raise_for_status().json()
        assert resumed["status"] == "finished"
        assert resumed["usage"]["cached_tokens"] == (64 if moves else 20 + 7), "all full blocks of the one that stayed"
        turns = turn, resumed, generate(home, session, [9])
        ends.append([each["token_ids"] for each in turns])
    assert ends[0] == ends[1]


def test_a_turn_that_is_repeated_there_with_its_key_is_not_taken_again(servers: Pair) -> None:
    session, key = open_session(servers.a), {"Idempotency-Key": "moved with it"}
    asked: dict[str, Any] = {"token_ids": PROMPT, "max_tokens": 6, "temperature": 1.0, "ignore_eos": True}
    turn = servers.a.post(f"/v1/sessions/{session}/generate", json=asked, headers=key).raise_for_status().json()
    servers.moved(session)
    again = servers.b.post(f"/v1/sessions/{session}/generate", json=asked, headers=key)
    assert (again.json(), again.headers["idempotent-replayed"]) == (turn, "true")
    assert servers.b.get(f"/v1/sessions/{session}").json()["tokens"] == len(PROMPT) + 6


def test_what_cannot_move_stays(servers: Pair) -> None:
    a = servers.a
    for each in a.get("/v1/sessions").json()["data"]:
        a.delete(f"/v1/sessions/{each['id']}").raise_for_status()
    session = open_session(a)
    assert servers.moved(empty := open_session(a))["tokens"] == 0
    assert generate(servers.b, empty, PROMPT)["status"] == "finished"
    generate(a, session, PROMPT)
    assert code(servers.move(session, "a", "a")) == (409, "already_there")
    assert code(servers.move(session, "a", "nobody")) == (422, "unknown_replica")
    assert code(servers.move("ses_nothing")) == (404, "not_found")
    a.post(f"/v1/sessions/{session}/breakpoints", json={"layer": 0, "action": "capture"}).raise_for_status()
    generate(a, session, [4], max_tokens=1)
    assert code(servers.move(session)) == (409, "wrong_state")
    a.delete(f"/v1/sessions/{session}/captures").raise_for_status()
    servers.moved(session)


def test_a_move_and_a_turn_that_begin_together_leave_one_winner(servers: Pair) -> None:
    a = servers.a
    for _ in range(4):
        session = used_session(a)
        with ThreadPoolExecutor(2) as both:
            turn = both.submit(a.post, f"/v1/sessions/{session}/generate", json={"token_ids": [3], "max_tokens": 4})
            moved = both.submit(servers.move, session)
        outcomes = turn.result().status_code, moved.result().status_code
        home = servers.settled(session)
        assert outcomes in [(200, 409), (409, 200), (421, 200), (200, 200)], outcomes
        assert home == ("b" if outcomes[1] == 200 else "a")
        tokens = view(servers.clients[home], session)["tokens"]
        assert tokens == len(PROMPT) + 8 + (5 if outcomes[0] == 200 else 0)


@pytest.mark.long
@pytest.mark.parametrize("is_back", [False, True])
def test_an_engine_that_dies_as_a_session_comes_is_no_loss(tmp_path: Path, is_back: bool) -> None:
    with pair(tmp_path, start=False, own_engine=True) as servers:
        a = servers.start("a")
        b = servers.start("b", prepare=partial(lose_engine, is_back))
        stays, moves = used_session(a), used_session(a)
        servers.moved(moves)
        until_ready(b)
        assert generate(b, moves, [9])["token_ids"] == generate(a, stays, [9])["token_ids"]


GOES = ("a hears that it is taken", "a has let it go", "b has written that it has it")
"""From here on the session has moved, whichever server dies."""
UNTOUCHED = "b has been offered it"
"""`a` has sent nothing: it goes on with the session."""
EITHER = "b begins to receive it"
"""`a` may have sent the whole session into a closed connection, or have noticed before."""
QUICK = "b has written that it has it"


@pytest.mark.parametrize(
    "place", [place if place == QUICK else pytest.param(place, marks=pytest.mark.long) for place in PLACES]
)
def test_a_session_has_one_home_after_a_kill_anywhere_in_the_protocol(tmp_path: Path, place: str) -> None:
    """Its name and its responses too."""
    dies = place[0]
    with pair(tmp_path, start=False, as_processes=True) as servers:
        for name in ("a", "b"):
            servers.start(name, prepare=partial(set_trap, place) if name == dies else None)
        chain = Chain("mine")
        with sdk(servers.urls["a"]) as client:
            for text in ("One", "Two"):
                chain.say(client, text)
        history = servers.a.get(f"/v1/sessions/{chain.session}/history").json()["token_ids"]
        if dies == "a":
            with pytest.raises(httpx.TransportError):
                servers.move(chain.session)
        else:
            status_of_move, told = code(servers.move(chain.session))
            assert status_of_move == 503
            assert told == ("peer_away" if place == UNTOUCHED else "move_unsettled") or place == EITHER
        assert servers.processes[dies].exit_status(60) == -9
        servers.end(dies)
        survivor = servers.clients["b" if dies == "a" else "a"]
        found = survivor.get(f"/v1/sessions/{chain.session}").status_code
        if dies == "a":
            assert found == (200 if place in GOES else 404)
        else:
            assert found == {"move_unsettled": 409, "peer_away": 200}[told]
        servers.start(dies)
        home = servers.settled(chain.session)
        assert home == ("b" if place in GOES else "a")
        other = "a" if home == "b" else "b"
        at_home, elsewhere = servers.clients[home], servers.clients[other]
        assert at_home.get(f"/v1/sessions/{chain.session}/history").json()["token_ids"] == history
        assert (named(at_home, "mine"), named(elsewhere, "mine")) == ([chain.session], [])
        assert [status(at_home, each) for each in chain.ids] == [200, 200]
        assert [status(elsewhere, each) for each in chain.ids] == [421 if home == "b" else 404] * 2
        servers.moved(chain.session, home, other)
        with sdk(servers.urls[other]) as client:
            assert chain.say(client, "Three").prompt > len(history)
        assert [status(elsewhere, each) for each in chain.ids] == [200] * 3
        assert [status(at_home, each) for each in chain.ids[:2]] == [421] * 2


def test_a_session_that_returns_is_known_all_the_while(servers: Pair) -> None:
    session = used_session(servers.a)
    with ThreadPoolExecutor() as pool:
        for here, there in (("a", "b"), ("b", "a")) * 4:
            moved = pool.submit(servers.moved, session, here, there)
            while not moved.done():
                assert servers.a.get(f"/v1/sessions/{session}").status_code in (200, 409, 421)


def test_an_operator_frees_a_session_whose_new_home_never_comes_back(tmp_path: Path) -> None:
    with pair(tmp_path, start=False, as_processes=True) as servers:
        a = servers.start("a")
        servers.start("b", prepare=partial(set_trap, "b is to take it"))
        session, stays = used_session(a), used_session(a)
        assert code(servers.move(session)) == (503, "move_unsettled")
        assert code(a.get(f"/v1/sessions/{session}")) == (409, "moving")

        def settle(of: str, dead: str) -> httpx.Response:
            return a.post(f"/v1/sessions/{of}/settle", json={"peer_is_dead": dead})

        wrong = settle(session, str(uuid4()))
        assert code(wrong) == (422, "field_out_of_range")
        dead = re.findall(r"with the journal (\S+),", wrong.json()["error"]["message"])[0]
        assert code(settle(session, "b")) == (422, "field_out_of_range")
        assert code(settle(stays, dead)) == (409, "wrong_state")
        assert code(settle("ses_nothing", dead)) == (404, "not_found")
        assert code(settle(session, dead)) == (409, "wrong_state"), "b lives"
        servers.end("b")
        (tmp_path / "b").rename(tmp_path / "lost")  # a mount is missing: a new journal knows nothing, which is no "no"
        with pytest.raises(RuntimeError, match=f"b has another journal .{dead}"):
            servers.start("b")
        assert code(a.get(f"/v1/sessions/{session}")) == (409, "moving")
        with Djinn(servers.urls["a"], http_client=a) as djinn:

            def is_freed() -> bool:
                with suppress(Conflict):  # until b's lease has run out
                    return djinn.sessions.settle(session, dead).info.tokens == len(PROMPT) + 8
                return False

            wait_until(is_freed)
            away = "replica b is away, and with it the sessions that it has"
            wait_until(lambda: away in [each.text for each in djinn.findings().data])  # `a` looks now and then
        assert generate(a, session, [9])["token_ids"] == generate(a, stays, [9])["token_ids"]
        assert servers.processes["a"].output.read_text().count("did not say whether it has a session") == 1
        servers.end("a")
        assert generate(servers.start("a"), session, [10])["status"] == "finished"
        shutil.rmtree(tmp_path / "b")
        (tmp_path / "lost").rename(tmp_path / "b")
        with pytest.raises(RuntimeError, match=f"the journal in this folder .{dead}. was given up"):
            servers.start("b")
