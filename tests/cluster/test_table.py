"""The directory's table: what it has said holds, also after a crash."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from app.cluster import table as tables
from app.cluster.directory import name_key, session_key
from app.cluster.table import FILE, Table
from app.domain.errors import DirectoryAway


async def test_the_first_to_bind_a_name_wins_and_a_move_overrules(tmp_path: Path) -> None:
    table = Table(tmp_path)
    key = name_key("tenant", "agent 1")
    assert await table.bind(key, "a") == "a"
    assert await table.bind(key, "b") == "a"
    await table.put(key, "b")
    assert await table.find(key) == "b"
    assert await table.find(name_key(None, "agent 1")) is None
    table.close()


async def test_what_was_said_survives_a_crash(tmp_path: Path) -> None:
    table = Table(tmp_path / "there")
    await table.put(session_key("ses_1"), "b")
    crashed = tmp_path / "crashed"
    shutil.copytree(tmp_path / "there", crashed)  # nothing was closed
    assert (crashed / FILE).exists()
    assert await Table(crashed).find(session_key("ses_1")) == "b"


async def test_names_without_end_push_out_those_that_nobody_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST", 3)
    table = Table(tmp_path)
    for number in range(5):
        await table.bind(name_key(None, str(number)), "a")
    assert [await table.find(name_key(None, str(number))) for number in range(5)] == [None, None, "a", "a", "a"]
    table.close()
    assert len(Table(tmp_path)) == 3


def test_a_folder_that_another_front_door_uses_is_refused(tmp_path: Path) -> None:
    table = Table(tmp_path)
    with pytest.raises(DirectoryAway):
        Table(tmp_path)
    table.close()


async def test_a_folder_and_its_file_are_their_owners_alone(tmp_path: Path) -> None:
    Table(tmp_path / "state" / "cluster").close()
    made = [tmp_path / "state", tmp_path / "state" / "cluster", *(tmp_path / "state" / "cluster").iterdir()]
    assert len(made) > 2
    assert [each.name for each in made if each.stat().st_mode & 0o077] == []
