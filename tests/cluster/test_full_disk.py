"""A server of a cluster whose disk is full: it serves what it has, and its neighbours notice nothing."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from tests.cluster.pair import PROMPT, code, generate, open_session, pair
from tests.durability.restarting import no_room
from tests.errors import assert_error

LEASE_S = 1.0
SOON_S = 30
TURN = {"token_ids": [9], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def is_ready(http: httpx.Client) -> bool:
    return http.get("/ready").status_code == 200


def holds_lease(http: httpx.Client) -> bool:
    return "djinn_lease_held 1.0" in http.get("/metrics").text


@pytest.mark.long
def test_a_server_without_room_for_its_journal_still_answers(tmp_path: Path) -> None:
    flags = ("--lease-s", f"{LEASE_S:g}")
    with pair(tmp_path, as_processes=True, flags={"a": flags, "b": flags}) as servers:
        full, other = servers.clients["a"], servers.clients["b"]
        here, there = open_session(full), open_session(other)
        history = [*PROMPT, *generate(full, here, PROMPT)["token_ids"]]
        generate(other, there, PROMPT)
        with no_room(servers.processes["a"], tmp_path / "a"):
            failed = full.post(f"/v1/sessions/{here}/generate", json=TURN)
            assert code(failed) == (500, "not_durable")
            history += [9, *failed.json()["turn"]["token_ids"]]
            until = time.monotonic() + 3 * LEASE_S  # several leases that could not be renewed in the journal
            while time.monotonic() < until:
                assert full.get(f"/v1/sessions/{here}/history").json()["token_ids"] == history
                assert holds_lease(full)
                time.sleep(0.05)
            assert_error(full.post("/v1/sessions"), 503, "journal_unavailable")
            assert_error(full.get("/ready"), 503, "journal_unavailable")
            assert_error(servers.move(here), 503, "journal_unavailable")
            assert_error(servers.move(there, "b", "a"), 503, "peer_full")
            assert servers.owners(here) == ["a"]
            assert servers.owners(there) == ["b"]
            assert is_ready(other)
            generate(other, there, [9])
        deadline = time.monotonic() + SOON_S
        while not is_ready(full):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        generate(full, here, [9])
        servers.moved(here)
        servers.moved(there, "b", "a")
        assert "lease" not in servers.processes["a"].output.read_text()
