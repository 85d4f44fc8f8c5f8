"""A journal that an older version wrote: nothing that was in it is missing, and a server goes on with it."""

import logging
import re
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.domain.errors import FieldOutOfRange
from app.domain.values import ForkPoint, Phase, Residency
from app.journal.journal import Journal
from app.journal.migrations import FORMAT, OLDEST
from app.journal.store import JournalStore
from app.journal.tables import load_responses, load_uploads
from app.sessions.keeper import SessionKeeper
from tests.durability.restarting import generate, open_session, serving
from tests.journal import written
from tests.journal.building import FILE, limit_pages, model_info
from tests.processes import serve_process

MODEL = replace(model_info("tiny-llama"), num_layers=4)
OPERATING = Path(__file__).parents[2] / "docs/operating.md"


def columns(path: Path) -> dict[str, list[Any]]:
    """Of each table, and what else the file's schema has."""
    with closing(sqlite3.connect(path)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema ORDER BY name")]
        return {name: connection.execute(f"PRAGMA table_info({name})").fetchall() for name in names}


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "format" in path.name)


def test_there_is_a_journal_of_this_version_for_the_next_one() -> None:
    assert OLDEST in written.formats()
    assert FORMAT in written.formats(), "run python -m tests.journal.written, and commit what it writes"


@pytest.mark.parametrize("number", written.formats())
def test_all_of_it_is_there(tmp_path: Path, number: int) -> None:
    ids = written.put(tmp_path, number)
    journal = Journal(tmp_path)
    found = {session.id: session for session in SessionKeeper(journal).load(MODEL)}
    responses, vectors = journal.store.read(load_responses), journal.store.read(load_uploads)
    journal.close()
    assert list(found)[:5] == list(ids)
    assert [len(session.history) for session in found.values()] == [20, 29, 11, 7, 25] + [20] * (number > 4)
    plain, steered = found[ids.plain], found[ids.steered]
    assert plain.history[:3].tolist() == written.PROMPTS[0]
    assert plain.metadata == {"name": "plain"}
    assert plain.phase is Phase.IDLE
    assert plain.usage.completion_tokens == 16
    assert (plain.usage.last is None) == (number == 4)
    assert found[ids.fork].forked_from == (None if number == 4 else ForkPoint(ids.plain, 20))
    assert steered.residency is Residency.GUARANTEED
    assert len(steered.breakpoints) == len(steered.interventions) == 1
    assert found[ids.named].name == "conversation 7"
    assert [response.session for response in responses] == [ids.of_response]
    assert [key.name for key in vectors] == ["calm"]


def test_it_is_as_one_that_this_version_made(tmp_path: Path) -> None:
    written.put(tmp_path, OLDEST)
    for path in (tmp_path / FILE, tmp_path / "new.sqlite3"):
        with closing(JournalStore(path)) as store:
            store.load(MODEL)
    assert columns(tmp_path / FILE) == columns(tmp_path / "new.sqlite3")


@pytest.mark.parametrize("number", [OLDEST, FORMAT])
def test_a_server_goes_on_with_it(tmp_path: Path, number: int) -> None:
    ids = written.put(tmp_path, number)
    with serving(tmp_path) as http:
        fresh = open_session(http)
        for prompt in written.PROMPTS:
            generate(http, fresh, prompt, 8)
        expected = generate(http, fresh, [12], 8)["token_ids"]
        assert generate(http, ids.plain, [12], 8)["token_ids"] == expected
        steered = http.get(f"/v1/sessions/{ids.steered}/breakpoints").json()["data"]
    with serving(tmp_path) as http:
        assert http.get(f"/v1/sessions/{ids.plain}").json()["tokens"] == 20 + 1 + 8
        assert http.get(f"/v1/sessions/{ids.steered}/breakpoints").json()["data"] == steered
        assert len(steered) == 1


def test_another_model_and_a_step_that_fails_leave_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.put(tmp_path, OLDEST)
    before = written.contents(tmp_path / FILE)
    with closing(JournalStore(tmp_path / FILE)) as store:
        with pytest.raises(FieldOutOfRange, match="those of model 'tiny-llama'"):
            store.load(replace(MODEL, name="another"))
        with monkeypatch.context() as patch:
            patch.setattr("app.journal.migrations.STEPS", (("ALTER TABLE model ADD COLUMN more TEXT", "nonsense"),))
            with pytest.raises(FieldOutOfRange, match="nonsense"):
                store.load(MODEL)
        assert written.contents(tmp_path / FILE) == before
        assert len(store.load(MODEL)) == 5


def test_a_disk_without_room_is_told_from_a_damaged_file(tmp_path: Path) -> None:
    written.put(tmp_path, OLDEST)
    before = written.contents(tmp_path / FILE)
    with closing(JournalStore(tmp_path / FILE)) as store:
        limit_pages(store)
        with pytest.raises(FieldOutOfRange, match=r"cannot open the journal .* is full; make room there"):
            store.load(MODEL)
        assert written.contents(tmp_path / FILE) == before
        limit_pages(store, more=100)
        assert len(store.load(MODEL)) == 5


def test_a_journal_that_cannot_be_kept_stays_as_it_is(tmp_path: Path) -> None:
    written.put(tmp_path, OLDEST)
    before = written.contents(tmp_path / FILE)
    in_the_way = tmp_path / f"{FILE}.format{OLDEST}"
    (in_the_way / "something").mkdir(parents=True)
    with closing(JournalStore(tmp_path / FILE)) as store, pytest.raises(FieldOutOfRange, match=r"stays so.*make room"):
        store.load(MODEL)
    assert written.contents(tmp_path / FILE) == before
    assert kept(tmp_path) == [in_the_way.name]


def way_back() -> str:
    section = OPERATING.read_text("utf-8").partition("## Upgrades")[2].partition("\n## ")[0]
    found = re.search(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.long
def test_the_way_back_of_the_documentation_leads_to_what_was_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / ".local/state/djinn"
    ids = written.put(folder, OLDEST)
    before = written.contents(folder / FILE)
    with serve_process(folder) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        generate(http, ids.plain, [12], 8)
        server.kill()  # what is written is in more files than one
        assert f"of format {OLDEST}, it is kept in {folder / FILE}.format{OLDEST}" in server.output.read_text()
    assert kept(folder) == [f"{FILE}.format{OLDEST}"]
    assert (folder / kept(folder)[0]).stat().st_mode & 0o777 == 0o600
    subprocess.run(["bash", "-euc", way_back()], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=True)
    assert written.contents(folder / FILE) == before
    with caplog.at_level(logging.INFO), serving(folder) as http:  # and forth again
        assert http.get(f"/v1/sessions/{ids.plain}").json()["tokens"] == 20
    assert kept(folder) == [f"{FILE}.format{OLDEST}"]
    assert "it is kept in" in caplog.text
