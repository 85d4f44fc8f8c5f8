"""Sessions outlive the server, with their KV, and so does what is told of them: to their owner, and nobody else."""

import asyncio
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.sessions.history import FILE, RUNNING
from tests.conftest import ServeWith
from tests.durability.restarting import TOKENS, generate, open_session, serving
from tests.errors import assert_error
from tests.journal.building import held_up
from tests.orderly import ServerThread, serve_thread
from tests.processes import serve_process
from tests.waiting import wait_until


@contextmanager
def as_if_killed(folder: Path) -> Iterator[httpx.Client]:
    """A server on what the one that uses `folder` would leave if it were killed now."""
    left = folder.with_name("left")
    shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(folder, left)
    with serving(left) as client:
        yield client


def sessions(http: httpx.Client) -> list[dict[str, Any]]:
    """All sessions, without where their KV is and has been: that begins anew with every server."""
    found: list[dict[str, Any]] = http.get("/v1/sessions").json()["data"]
    for view in found:
        del view["kv"]
        for moved in ("bytes_out", "bytes_in", "restores"):
            del view["usage"][moved]
    return found


def test_what_was_answered_is_there_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "state"

    def assert_kept() -> None:
        with as_if_killed(folder) as after:
            assert sessions(after) == sessions(http)

    with serving(folder) as http:
        first = open_session(http, metadata={"name": "\N{GRINNING FACE}"}, ttl_s=1000)
        assert_kept()
        generate(http, first, [5, 6, 7])
        assert_kept()
        other = http.post(f"/v1/sessions/{first}/fork").json()["id"]
        assert_kept()
        http.post(f"/v1/sessions/{first}/rewind", json={"to_token": 4})
        assert_kept()
        generate(http, first, [9], stop=[generate(http, other, [9])["text"][:3]])
        assert_kept()
        http.post(f"/v1/sessions/{other}/phase", json={"phase": "io_wait"})
        http.delete(f"/v1/sessions/{first}")
        assert_kept()
        before = sessions(http)[0]
        long = {"token_ids": [1], "max_tokens": 900, "ignore_eos": True, "stream": True}
        with http.stream("POST", f"/v1/sessions/{other}/generate", json=long) as answer:
            parts = answer.iter_raw()  # the iterator closes its stream when it is collected
            next(parts)
            with as_if_killed(folder) as after:
                [view] = sessions(after)
        for name in ("state", "tokens", "usage"):
            assert view[name] == before[name]


async def test_nothing_is_answered_before_it_is_durable(tmp_path: Path) -> None:
    turn = {"token_ids": [5], "max_tokens": 2}
    asked: list[tuple[str, str, Any]] = [
        ("POST", "", {}),
        ("POST", "/{}/fork", None),
        ("POST", "/{}/rewind", {"to_token": 1}),
        ("DELETE", "/{}", None),
        ("POST", "/{}/generate", turn),
        ("POST", "/{}/generate", {**turn, "stream": True}),
    ]
    with serving(tmp_path) as http:
        sessions = [open_session(http) for _ in asked]
        for session in sessions:
            generate(http, session, [5, 6], 2)
        async with httpx.AsyncClient(base_url=http.base_url, timeout=30) as client:
            with held_up(tmp_path):
                answering = [
                    asyncio.create_task(client.request(method, f"/v1/sessions{path.format(session)}", json=body))
                    for (method, path, body), session in zip(asked, sessions, strict=True)
                ]
                await asyncio.sleep(0.3)
                assert not any(each.done() for each in answering)
                assert (await client.get("/health")).status_code == 200
            assert all(each.is_success for each in await asyncio.gather(*answering))


async def test_a_call_that_leaves_nothing_does_not_wait_for_the_journal(tmp_path: Path) -> None:
    call = {"model": "tiny-llama", "prompt": [5] * 40, "max_tokens": 4}
    with serving(tmp_path) as http:
        session = open_session(http)
        with held_up(tmp_path):
            assert http.post("/v1/completions", json=call).status_code == 200
            assert http.post(f"/v1/sessions/{session}/phase", json={"phase": "idle"}).status_code == 200


def test_a_session_that_expired_meanwhile_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, call = tmp_path / "state", {"model": "tiny-llama", "prompt": [5] * 40, "max_tokens": 4}
    monkeypatch.setattr("app.sessions.named.UNNAMED_TTL_S", 1)
    with serving(folder) as http:
        brief, lasting = open_session(http, ttl_s=1), open_session(http, ttl_s=100)
        asked = [http.post("/v1/completions", json=call).headers["x-session-id"] for _ in range(2)]
        http.post("/v1/completions", json=call | {"n": 2}).raise_for_status()  # leaves nothing to list
    assert asked[0] == asked[1]
    time.sleep(1)
    with serving(folder) as http:
        assert_error(http.get(f"/v1/sessions/{brief}"), 404, "not_found", param="session_id")
        assert [view["id"] for view in sessions(http)] == [lasting]
        assert {each["id"] for each in http.get("/v1/sessions/closed").json()["data"]} == {brief, asked[0]}
        assert http.post("/v1/completions", json=call).raise_for_status().headers["x-session-id"] != asked[0]


SESSIONS, NEXT = 20, [7, 8]
SMALL_HOST = ("--kv-device", "4MiB", "--kv-host", "1MiB")
KEPT = re.compile(r"sessions with KV on disk: (\d+), with (\d+) tokens; sessions that lose KV: (\d+), with (\d+)")
TOLD = {"phase": "io_wait", "resume_in_ms": 60_000}
PHASES = [None, TOLD, *({"phase": phase} for phase in ("io_wait", "idle", "ready"))]


def kept(server: ServerThread) -> list[int]:
    """End it: sessions with KV on disk, their tokens, and the same of those that lose KV, as its log says."""
    server.tell()
    assert server.exit_status(60) == 0
    found = KEPT.search(server.log)
    assert found is not None, server.log
    return [int(number) for number in found.groups()]


def prompt(number: int) -> list[int]:
    return [3 + number, *range(20, 40 + 3 * (number % 13))]


def next_turn(http: httpx.Client, session: str) -> tuple[list[int], int]:
    """Its tokens, and how many the server has recomputed for it."""
    answer = generate(http, session, NEXT)
    return answer["token_ids"], answer["usage"]["tokens_recomputed"]


@pytest.mark.parametrize("flags", [(), SMALL_HOST], ids=["host as it is", "host smaller than the device"])
def test_parked_and_resident_sessions_recompute_nothing(
    tmp_path: Path, http: httpx.Client, flags: tuple[str, ...]
) -> None:
    folder = tmp_path / "state"
    with serve_thread(folder, *flags) as (server, client):
        sessions = [open_session(client) for _ in range(SESSIONS)]
        for number, (session, phase) in enumerate(zip(sessions, itertools.cycle(PHASES), strict=False)):
            generate(client, session, prompt(number))
            if phase is not None:
                client.post(f"/v1/sessions/{session}/phase", json=phase).raise_for_status()
        count, tokens, lost, _ = kept(server)
        assert (count, lost) == (SESSIONS, 0)
        assert tokens == sum(len(prompt(number)) + TOKENS - 1 for number in range(SESSIONS))
    with serve_thread(folder, *flags) as (_, client):
        after = [next_turn(client, session) for session in sessions]
        assert [each["kind"] for each in activity(client)["marks"]][1:4] == ["draining", "drained", "stopped"]
    assert [recomputed for _, recomputed in after] == [0] * SESSIONS
    for number, (token_ids, _) in enumerate(after):
        uninterrupted = open_session(http)
        generate(http, uninterrupted, prompt(number))
        assert next_turn(http, uninterrupted)[0] == token_ids
        http.delete(f"/v1/sessions/{uninterrupted}").raise_for_status()


def test_kv_of_another_type_is_computed_again(tmp_path: Path) -> None:
    """Of the same type nothing is."""
    folder, recomputed = tmp_path / "state", list[int]()
    for flags in ((), ("--kv-dtype", "bfloat16"), ("--kv-dtype", "bfloat16")):
        with serve_thread(folder, *flags) as (server, client):
            if not recomputed:
                session = open_session(client)
                generate(client, session, prompt(3))
            recomputed.append(next_turn(client, session)[1])
            assert kept(server)[2:] == [0, 0]
    assert [bool(tokens) for tokens in recomputed] == [False, True, False]


def test_imported_sessions_recompute_nothing_and_still_share_with_none_but_their_forks(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serve_thread(folder) as (server, client):
        origin = open_session(client)
        generate(client, origin, prompt(12))
        file = client.get(f"/v1/sessions/{origin}/export").raise_for_status().content
        untouched, used = (client.post("/v1/sessions/import", content=file).json()["id"] for _ in range(2))
        expected = next_turn(client, used)[0]
        fork = client.post(f"/v1/sessions/{untouched}/fork").json()["id"]
        assert client.delete(f"/v1/sessions/{origin}").is_success
        assert kept(server)[2:] == [0, 0]
    with serve_thread(folder) as (server, client):
        tiers = [client.get(f"/v1/sessions/{each}").json()["kv"]["tier"] for each in (untouched, used, fork)]
        assert tiers[:2] == ["disk", "disk"]
        assert next_turn(client, untouched) == (expected, 0)
        assert next_turn(client, used)[1] == 0
        assert next_turn(client, fork)[0] == expected
        stranger = open_session(client)
        assert generate(client, stranger, [*prompt(12), 1])["usage"]["cached_tokens"] == 0


def timeline(http: httpx.Client, session: str, **query: int) -> Any:
    return http.get(f"/v1/sessions/{session}/timeline", params=query).raise_for_status().json()["data"]


def activity(http: httpx.Client, **query: float) -> Any:
    return http.get("/v1/activity", params=query).raise_for_status().json()


def test_a_closed_session_is_remembered_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, began = tmp_path / "state", time.time()
    monkeypatch.setattr("app.sessions.history.LOOK_AT_MEMORY_S", 0.05)
    with serving(folder) as http:
        session = open_session(http, metadata={"name": "Ärger"})
        usage = generate(http, session, [5, 6, 7])["usage"]
        for waits in ([1], [1, 60_000]):  # the last one counts
            for wait_ms in waits:
                http.post(f"/v1/sessions/{session}/phase", json={"phase": "io_wait", "resume_in_ms": wait_ms})
                time.sleep(0.01)
            generate(http, session, [8])

        def is_noted() -> bool:
            memory, minutes = http.get("/v1/memory").json(), activity(http)["minutes"]
            noted = minutes[-1]["device_bytes"], sum(each["bytes_out"] for each in minutes)
            return noted == (memory["data"]["device"]["owned_bytes"], memory["moves"]["out"]["bytes"])

        wait_until(is_noted)
    monkeypatch.setattr("app.main.version", lambda name: "0.0")
    (folder / RUNNING).touch()  # as a kill leaves it
    os.utime(folder / RUNNING, (began, began))
    with serving(folder) as http:
        generate(http, session, [9])
        assert "recomputed: the server or its engine was started anew" in http.get("/v1/findings").text
        wait_until(lambda: (folder / RUNNING).stat().st_mtime > began + 1)
        http.delete(f"/v1/sessions/{session}")
        told = timeline(http, session)[::-1]
        kinds = [entry["kind"] for entry in told if entry["kind"] != "moved"]
        assert kinds == ["opened", *("turn", "phase") * 2, "phase", "turn", "restored", "turn", "closed"]
        first, second, third, last = (entry for entry in told if entry["kind"] == "turn")
        assert first == first | usage | {"status": "finished", "late_s": None, "recompute_reason": None}
        assert second["late_s"] > 0 > third["late_s"]
        assert last["recompute_reason"] == "restarted"
        asked = [{"find": find} for find in ("ÄRGER ses_", session[-8:].upper(), "%")]
        found = [http.get("/v1/sessions/closed", params=each).json()["data"] for each in asked]
        assert [[each["name"] for each in page] for page in found] == [["Ärger"], ["Ärger"], []]
        assert began <= told[0]["at"] <= second["at"] - second["seconds"] <= told[-1]["at"] <= time.time()
        assert timeline(http, session, limit=2, before=told[-1]["id"]) == told[-2:-4:-1]
        done = activity(http, since=began - 60, step_s=3600)
        assert [mark["kind"] for mark in done["marks"]] == ["started", "stopped", "killed", "deployed"]
        assert done["marks"][2]["at"] == pytest.approx(began, abs=1e-3)
        prompts = sum(each["prompt_tokens"] for each in (first, second, third, last))
        wanted = {"turns": 4, "failed": 0, "late": 1, "prompt_tokens": prompts}
        assert {name: sum(each[name] for each in done["minutes"]) for name in wanted} == wanted


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_paused_turn_that_a_restart_ended_is_told_until_the_next_one(tmp_path: Path, is_killed: bool) -> None:
    with serve_process(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        path = f"/v1/sessions/{(session := open_session(http))}"
        http.post(f"{path}/breakpoints", json={"layer": 1, "action": "pause", "once": True})
        assert generate(http, session, [8, 9])["status"] == "paused"
        http.patch(path, json={"metadata": {}})  # answered when the journal has the pause
        server.kill() if is_killed else server.terminate()
    with serving(tmp_path):
        pass
    with serving(tmp_path) as http:
        lost = http.get(path).json()["interrupted_turn"]
        assert lost == {"at": lost["at"], "layer": 1, "point": "resid_post", "tokens_lost": 2 if is_killed else 0}
        told = [(each["code"], each["finish_reason"]) for each in timeline(http, session) if each["kind"] == "turn"]
        assert told == [("server_restarted", None) if is_killed else (None, "shutdown")]
        generate(http, session, [4])
        assert http.get(path).json()["interrupted_turn"] is None


@pytest.mark.parametrize("damage", ["garbage", "a folder", "pages"])
def test_a_damaged_history_is_made_anew(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "state" / FILE
    file.parent.mkdir()
    if damage == "garbage":
        file.write_bytes(b"x" * 5000)
    elif damage == "a folder":  # what happens is in memory then
        file.mkdir()
    with serving(tmp_path / "state") as http:
        session = open_session(http)
        assert [entry["kind"] for entry in timeline(http, session)] == ["opened"]
    if damage == "pages":
        with file.open("r+b") as opened:  # it opens: what is wrong shows as it is read
            opened.seek(4096)
            opened.write(b"x" * (file.stat().st_size - 4096))
        with serving(tmp_path / "state") as http:
            assert [entry["kind"] for entry in timeline(http, session)] == ["restored"]
            generate(http, session, [5])
            assert "turn" in [entry["kind"] for entry in timeline(http, session)]


def test_no_tenant_sees_the_history_of_another(serve_with: ServeWith) -> None:
    http = serve_with(api_keys=("sesame", "other"))
    mine, others = ({"authorization": f"Bearer {key}"} for key in ("sesame", "other"))
    session = http.post("/v1/sessions", headers=mine).json()["id"]
    http.post(f"/v1/sessions/{session}/generate", json={"token_ids": [1], "max_tokens": 1}, headers=mine)
    http.delete(f"/v1/sessions/{session}", headers=mine)
    path = f"/v1/sessions/{session}/timeline"
    assert http.get(path, headers=mine).json()["data"][0]["kind"] == "closed"
    assert_error(http.get(path, headers=others), 404, "not_found", param="session_id")
    assert_error(http.get(path, params={"before": 1 << 63}, headers=mine), 422, "field_out_of_range", param="before")
    seen = [http.get("/v1/activity", headers=each).json()["minutes"] for each in (mine, others)]
    assert http.get("/v1/sessions/closed", headers=others).json()["data"] == []
    assert ([each["agents"] for each in seen[0]], seen[1]) == ([1], [])
