"""A journal of an older version, and turns as soon as the new one serves: none of them is lost, nor any from before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from app.cli import main
from app.journal.migrations import OLDEST
from tests.durability.load import load_on
from tests.durability.restarting import serving
from tests.journal import written
from tests.processes import serve_process

NEW = 3
BEFORE_BACKUP, AFTER_BACKUP = 12, 12
"""Turns of all agents."""


def assert_there(http: httpx.Client, before: dict[str, list[int]], answered: dict[str, list[int]]) -> None:
    """Each session has its history, and then the turns that were answered."""
    for session in before.keys() | answered.keys():
        found = http.get(f"/v1/sessions/{session}/history").raise_for_status().json()["token_ids"]
        expected = [*before.get(session, []), *answered.get(session, [])]
        assert found[: len(expected)] == expected


async def test_no_turn_is_lost_in_an_upgrade(tmp_path: Path) -> None:
    folder, copy = tmp_path / "state", tmp_path / "copy"
    ids = written.put(folder, OLDEST)
    before = written.histories(folder)
    with serve_process(folder) as server:
        async with load_on(server.url, [ids.plain, ids.fork, ids.named, *[None] * NEW]) as load:
            await load.until(BEFORE_BACKUP)
            backed_up = {session: list(tokens) for session, tokens in load.answered.items()}
            assert await asyncio.to_thread(main, ["backup", "--state-dir", str(folder), str(copy)]) == 0
            await load.until(load.turns + AFTER_BACKUP)
        server.kill()
    assert {ids.plain, ids.fork, ids.named} < load.answered.keys()
    for kept, answered in ((folder, load.answered), (copy, backed_up)):
        with serving(kept) as http:
            assert_there(http, before, answered)
