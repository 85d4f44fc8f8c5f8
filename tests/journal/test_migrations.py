"""A journal that an older version wrote: nothing that was in it is missing, and a server goes on with it."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.domain.errors import FieldOutOfRange
from app.domain.values import Phase, Residency, SessionId
from app.journal.journal import Journal
from app.journal.migrations import FORMAT
from app.journal.store import JournalStore
from app.sessions.keeper import SessionKeeper
from tests.durability.restarting import generate, open_session, serving
from tests.journal.building import FILE, model_info

WRITTEN = Path(__file__).with_name("format4.sql")
"""What a server with the tiny model, of the version before format 5, left when it had ended: two turns in PLAIN, which
was then forked into FORK and `idle`; a turn in STEERED, with a vector; a named session, and a kept response.
"""
PLAIN, FORK, STEERED, NAMED, OF_RESPONSE = (
    SessionId(f"ses_18eb2517{end}")
    for end in (
        "c589acab720fb07b189bca1dee41",
        "e98321124cd896f855d4650fe576",
        "ec45f536ef4e8998b14e64a4d8b5",
        "ee391b45d9ad1fdea02abcbb07ef",
        "ef657ad61938989902a370d19d62",
    )
)
PROMPTS = [[5, 6, 7], [9]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state folder with that journal. Its sessions have just been used: none has expired."""
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.executescript(WRITTEN.read_text())
        connection.execute("UPDATE session SET used_at = ?", (time.time(),))
    connection.close()
    return tmp_path


def columns(path: Path) -> dict[str, list[Any]]:
    """Of each table, and what else the file's schema has."""
    with sqlite3.connect(path) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema ORDER BY name")]
        found = {name: connection.execute(f"PRAGMA table_info({name})").fetchall() for name in names}
    connection.close()
    return found


def test_all_of_it_is_there(folder: Path) -> None:
    journal = Journal(folder)
    model = replace(model_info("tiny-llama"), num_layers=4)
    found = {session.id: session for session in SessionKeeper(journal).load(model)}
    responses, vectors = journal.load_responses(), journal.load_vectors()
    journal.close()
    assert list(found) == [PLAIN, FORK, STEERED, NAMED, OF_RESPONSE]
    assert [len(session.history) for session in found.values()] == [20, 29, 11, 7, 25]
    assert found[PLAIN].history[:3].tolist() == PROMPTS[0]
    assert found[PLAIN].metadata == {"name": "plain"}
    assert found[PLAIN].phase is Phase.IDLE
    assert found[PLAIN].usage.completion_tokens == 16
    assert found[PLAIN].usage.last is None
    assert found[FORK].forked_from is None
    assert found[STEERED].residency is Residency.GUARANTEED
    assert len(found[STEERED].breakpoints) == len(found[STEERED].interventions) == 1
    assert found[NAMED].name == "conversation 7"
    assert [response.session for response in responses] == [OF_RESPONSE]
    assert [key.name for key in vectors] == ["calm"]


def test_it_is_as_one_that_this_version_made(folder: Path, tmp_path: Path) -> None:
    for path in (folder / FILE, tmp_path / "new.sqlite3"):
        JournalStore(path).close()
    assert columns(folder / FILE) == columns(tmp_path / "new.sqlite3")


def test_a_server_goes_on_with_it(folder: Path) -> None:
    with serving(folder) as http:
        fresh = open_session(http)
        for prompt in PROMPTS:
            generate(http, fresh, prompt, 8)
        expected = generate(http, fresh, [12], 8)["token_ids"]
        assert generate(http, PLAIN, [12], 8)["token_ids"] == expected
        steered = http.get(f"/v1/sessions/{STEERED}/breakpoints").json()["data"]
    with serving(folder) as http:
        assert http.get(f"/v1/sessions/{PLAIN}").json()["tokens"] == 20 + 1 + 8
        assert http.get(f"/v1/sessions/{STEERED}/breakpoints").json()["data"] == steered
        assert len(steered) == 1


def test_a_step_that_fails_leaves_the_file_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = columns(folder / FILE)
    monkeypatch.setattr("app.journal.migrations.STEPS", (("ALTER TABLE model ADD COLUMN more TEXT", "nonsense"),))
    with pytest.raises(FieldOutOfRange, match="nonsense"):
        JournalStore(folder / FILE)
    assert columns(folder / FILE) == before
    monkeypatch.undo()
    JournalStore(folder / FILE).close()
    with sqlite3.connect(folder / FILE) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (FORMAT,)
    connection.close()
