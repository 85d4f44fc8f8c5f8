"""A server that ends in order leaves the KV of its sessions on disk: their next turns recompute nothing."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.durability.restarting import TOKENS, generate, open_session
from tests.orderly import ServerThread, serve_thread

SESSIONS = 20
NEXT = [7, 8]
SMALL_HOST = ("--kv-device", "4MiB", "--kv-host", "1MiB")
KEPT = re.compile(r"sessions with KV on disk: (\d+), with (\d+) tokens; sessions that lose KV: (\d+), with (\d+)")
PHASES: list[dict[str, Any] | None] = [
    None,
    {"phase": "io_wait", "resume_in_ms": 60_000},
    {"phase": "io_wait"},
    {"phase": "idle"},
    {"phase": "ready"},
]


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
    """Its tokens, and how many the server has computed again for it."""
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


def send(client: httpx.Client, file: bytes) -> str:
    answer = client.post("/v1/sessions/import", content=file)
    assert answer.status_code == 201, answer.text
    session: str = answer.json()["id"]
    return session


def test_imported_sessions_recompute_nothing_and_still_share_with_none_but_their_forks(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serve_thread(folder) as (server, client):
        origin = open_session(client)
        generate(client, origin, prompt(12))
        file = client.get(f"/v1/sessions/{origin}/export").raise_for_status().content
        untouched, used = send(client, file), send(client, file)
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
