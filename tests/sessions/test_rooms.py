"""What turns and other work may take: time, tokens, and the journal's room on a disk."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from app.domain.errors import DiskShort
from app.domain.values import SessionId
from app.journal.journal import COPIES
from app.machine.budget import DiskRoom
from app.sessions.keeper import JournalRoom
from app.sessions.side_work import Lane, SideWork
from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.file_sizes import free_on_disks
from tests.waiting import settled

# The journal's room on a disk.

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


# Time for work that is no turn.

AT_ONCE = max(1, (os.cpu_count() or 1) // 2)


def calm(owner: str | None) -> bool:
    return False  # only its own turns are under way


def busy(owner: str | None) -> bool:
    return True


async def test_a_tenant_has_few_pieces_at_once_and_others_do_not_wait_for_them() -> None:
    work, leave, other_begun = SideWork(calm), threading.Event(), threading.Event()
    begun: list[str] = []

    def piece(owner: str) -> None:
        begun.append(owner)
        if owner == "one":
            other_begun.set()
        assert leave.wait(30)

    many = [asyncio.create_task(work.run("many", piece, "many")) for _ in range(AT_ONCE + 5)]
    one = asyncio.create_task(work.run("one", piece, "one"))
    assert await asyncio.to_thread(other_begun.wait, 30)
    assert begun.count("many") <= AT_ONCE
    leave.set()
    await asyncio.gather(one, *many)
    assert begun.count("many") == len(many)


async def test_who_leaves_keeps_the_place_until_the_work_is_done() -> None:
    work, leave = SideWork(calm), threading.Event()
    left = [asyncio.create_task(work.run("a", leave.wait, 30)) for _ in range(AT_ONCE)]
    await settled()
    for task in left:
        task.cancel()
    after = asyncio.create_task(work.run("a", str))
    assert not (await asyncio.wait([after], timeout=0.1))[0]
    leave.set()
    assert await after == ""
    assert all(isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*left, return_exceptions=True))


async def use(work: SideWork, owner: str, seconds: float) -> None:
    async with work.turn(owner, Lane.FILE) as piece:
        piece.seconds = seconds


async def test_beside_the_turns_of_others_a_tenant_waits_after_each_piece() -> None:
    work = SideWork(busy)
    await use(work, "a", 1000.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(use(work, "a", 0.0), 0.1)
    await asyncio.wait_for(use(work, "b", 0.0), 30)


async def test_a_text_does_not_wait_for_a_file_and_an_error_gives_the_place_back() -> None:
    work = SideWork(busy)
    async with work.turn("a", Lane.FILE) as piece:
        piece.seconds = 1000.0
        assert await asyncio.wait_for(work.run("a", str), 30) == ""
    alone = SideWork(calm)
    for _ in range(AT_ONCE + 1):
        with pytest.raises(ValueError, match="no number"):
            await asyncio.wait_for(alone.run("a", int, "no number"), 30)
