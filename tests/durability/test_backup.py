"""`djinn backup`: a copy that can be served, made while a server uses the folder."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import httpx
import pytest

from app.cli import main
from app.journal.journal import FILE_NAME
from tests.durability.restarting import TOKENS, generate, open_session, serving
from tests.processes import serve_process

AGENTS = 6
PROMPT = [5, 6, 7]
BEFORE_BACKUP, AFTER_BACKUP = 12, 6
"""Turns of all agents."""


class Load:
    """Agents that take turns until they are stopped; `answered` has the tokens of each session's turns."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.answered: dict[str, list[int]] = {}

    @property
    def turns(self) -> int:
        return sum(len(tokens) // (len(PROMPT) + TOKENS) for tokens in self.answered.values())

    async def until(self, turns: int) -> None:
        async with asyncio.timeout(60):
            while self.turns < turns:  # noqa: ASYNC110 (an answer is all that tells of it)
                await asyncio.sleep(0.005)

    async def agent(self) -> None:
        session = (await self._client.post("/v1/sessions")).json()["id"]
        body = {"token_ids": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        while True:
            answer = (await self._client.post(f"/v1/sessions/{session}/generate", json=body)).raise_for_status()
            self.answered.setdefault(session, []).extend([*PROMPT, *answer.json()["token_ids"]])


async def test_no_turn_is_missing_that_was_answered_before(tmp_path: Path) -> None:
    folder, copy = tmp_path / "state", tmp_path / "backups" / "monday"
    with serve_process(folder) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            load = Load(client)
            agents = [asyncio.create_task(load.agent()) for _ in range(AGENTS)]
            await load.until(BEFORE_BACKUP)
            before = {session: list(tokens) for session, tokens in load.answered.items()}
            assert await asyncio.to_thread(main, ["backup", "--state-dir", str(folder), "--with-kv", str(copy)]) == 0
            await load.until(load.turns + AFTER_BACKUP)
            for agent in agents:
                agent.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*agents)
    with serving(copy) as http:
        for session, tokens in before.items():
            found = http.get(f"/v1/sessions/{session}/history").json()["token_ids"]
            assert found[: len(tokens)] == tokens
            generate(http, session, PROMPT)


def test_kv_comes_with_it_if_it_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serve_process(folder) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        session = open_session(http)
        generate(http, session, PROMPT)
        server.terminate()
    for name, flags in (("journal", []), ("all", ["--with-kv"])):
        assert main(["backup", "--state-dir", str(folder), *flags, str(tmp_path / name)]) == 0
    recomputed = {}
    for name in ("journal", "all"):
        with serving(tmp_path / name) as http:
            recomputed[name] = generate(http, session, [9])["usage"]["tokens_recomputed"]
    assert recomputed == {"journal": len(PROMPT) + TOKENS - 1, "all": 0}
    with serving(folder) as http:  # serving a copy has taken nothing from what it is of
        assert generate(http, session, [9])["usage"]["tokens_recomputed"] == 0


def test_the_folder_is_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serving(folder) as http:
        open_session(http)
    before = sorted(path.name for path in folder.iterdir())
    assert main(["backup", "--state-dir", str(folder), str(tmp_path / "copy")]) == 0
    assert sorted(path.name for path in folder.iterdir()) == before
    assert (tmp_path / "copy").stat().st_mode & 0o077 == 0


def test_an_empty_folder_that_is_there_stays_the_same_one(tmp_path: Path) -> None:
    """It may be where a disk is mounted, which cannot be replaced."""
    folder, target = tmp_path / "state", tmp_path / "copy"
    with serving(folder) as http:
        open_session(http)
    target.mkdir()
    before = target.stat().st_ino
    assert main(["backup", "--state-dir", str(folder), "--with-kv", str(target)]) == 0
    assert target.stat().st_ino == before
    assert not any(path.name.startswith(".") for path in target.iterdir())
    with serving(target) as http:
        assert len(http.get("/v1/sessions").json()["data"]) == 1


def test_what_cannot_be_done_is_said_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, target = tmp_path / "state", tmp_path / "copy"
    folder.mkdir()

    def refused(*arguments: str) -> str:
        assert main(["backup", *arguments]) == 2
        return capsys.readouterr().err

    assert f"no journal in {folder}" in refused("--state-dir", str(folder), str(target))
    (folder / FILE_NAME).write_bytes(b"not a journal at all" * 500)
    assert "cannot be copied" in refused("--state-dir", str(folder), str(target))
    assert "--state-dir is none" in refused("--state-dir", "none", str(target))
    assert "is there already" in refused("--state-dir", str(folder), str(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]
