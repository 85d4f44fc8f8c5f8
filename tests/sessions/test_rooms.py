"""What turns may take: log-probabilities, tokens of a tenant, and the journal's room on a disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from app.domain.breakpoints import MAX_INTERVENTION_BYTES
from app.domain.errors import DiskShort, EngineError, FieldOutOfRange, LogprobsFull
from app.domain.values import SessionId, Ticket
from app.journal.attempts import COPIES
from app.machine.disk import DiskRoom
from app.messages import Failed, Started
from app.sessions.charges.logprob_room import BYTES_EACH, LogprobRoom
from app.sessions.charges.turn_charge import TurnCharge
from app.sessions.guards.journal_room import JournalRoom
from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.file_sizes import free_on_disks


def test_a_turn_that_fails_costs_its_tenant_nothing() -> None:
    settled: list[int] = []
    charge = TurnCharge(settled.append, sent=300)
    for event in (Started(Ticket(1), 60), Failed(Ticket(1), EngineError("x"))):
        charge.observe(event)
    assert settled == [0]


MOST_LOGPROBS = 100


def has_room(logprobs: LogprobRoom, owner: str | None, count: int) -> bool:
    try:
        logprobs.check(owner, count)
    except LogprobsFull:
        return False
    return True


def test_a_tenant_with_several_calls_leaves_as_much_to_others() -> None:
    logprobs = LogprobRoom(MOST_LOGPROBS * BYTES_EACH)
    logprobs.take("ada", MOST_LOGPROBS)  # one call may have all of it
    assert not any(has_room(logprobs, owner, 1) for owner in ("ada", "bob", None))
    logprobs.give("ada", MOST_LOGPROBS)
    while has_room(logprobs, "ada", 10):
        logprobs.take("ada", 10)
    assert has_room(logprobs, "bob", 50)
    assert not has_room(logprobs, "bob", 51)
    with pytest.raises(FieldOutOfRange, match="at most 100 fit max_logprobs_bytes") as refused:
        logprobs.check("ada", MOST_LOGPROBS + 1)
    assert refused.value.param == "logprobs"


FREE = 1000
ONE, OTHER = SessionId("ses_1"), SessionId("ses_2")
PAUSED: Any = {"token_ids": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> JournalRoom:
    """On a disk with `FREE` bytes beside its reserve."""
    free_on_disks(monkeypatch, lambda: COPIES * FREE + 5)
    return JournalRoom(DiskRoom(tmp_path, 5))


def put(room: JournalRoom, session: SessionId, count: int) -> None:
    with room.keeping(session, count):
        pass


def test_what_a_turn_brings_keeps_its_room_until_the_end(room: JournalRoom) -> None:
    put(room, ONE, 600)
    for _ in range(2):
        with pytest.raises(DiskShort):
            put(room, OTHER, 600)
        with pytest.raises(DiskShort), room.claiming(600):
            pass
    room.release(ONE)
    put(room, OTHER, FREE)


def test_what_was_not_done_takes_no_room_but_what_is_cancelled_may_still_be_done(room: JournalRoom) -> None:
    with pytest.raises(KeyError), room.keeping(ONE, FREE):
        raise KeyError
    with pytest.raises(KeyError), room.claiming(FREE):
        raise KeyError
    with pytest.raises(asyncio.CancelledError), room.keeping(ONE, FREE):
        raise asyncio.CancelledError
    with pytest.raises(DiskShort):
        put(room, OTHER, FREE)
    room.release(ONE)
    put(room, OTHER, FREE)


def test_a_session_claims_no_more_than_it_can_bring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free_on_disks(monkeypatch, lambda: 3 * COPIES * MAX_INTERVENTION_BYTES)
    room = JournalRoom(DiskRoom(tmp_path))
    for _ in range(10):
        put(room, ONE, MAX_INTERVENTION_BYTES)
    put(room, OTHER, MAX_INTERVENTION_BYTES)


def test_a_disk_without_room_refuses_them_and_keeps_turns(serve_with: ServeWith, tmp_path: Path) -> None:
    http = serve_with(state_dir=tmp_path, disk_reserve=1 << 60)
    path = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
    hidden = http.get("/v1/models").json()["data"][0].get("hidden_size", 64)
    vector = save({"vector": np.ones(hidden, np.float32)})
    assert_error(http.post("/v1/vectors", params={"name": "calm"}, content=vector), 503, "disk_full")
    adding = {"layers": [1], "action": "edit", "edits": [{"op": "add", "vector": [1.0] * hidden}]}
    assert_error(http.post(f"{path}/breakpoints", json=adding), 503, "disk_full")
    assert http.get(f"{path}/breakpoints").json()["data"] == []
    http.post(f"{path}/breakpoints", json={"layers": [1], "action": "pause"}).raise_for_status()
    assert http.post(f"{path}/generate", json=PAUSED).raise_for_status().json()["status"] == "paused"
    activation = http.get(f"{path}/checkpoint/activation").raise_for_status().content
    assert_error(http.put(f"{path}/checkpoint/activation", content=activation), 503, "disk_full")
    edit = {"edits": [{"op": "add", "vector": [1.0] * hidden}]}
    assert_error(http.post(f"{path}/checkpoint/edit", json=edit), 503, "disk_full")
    ended = http.post(f"{path}/resume", json={"until": "end"}).raise_for_status().json()
    assert ended["status"] == "finished"
