"""The journal's file: batches, damage, other versions, and responses in it."""

import tempfile
from array import array
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from app.domain.errors import FieldOutOfRange
from app.domain.homes import Home, HomeState
from app.domain.values import ModelInfo, SessionId
from app.journal.migrations import FORMAT, OLDEST
from app.journal.records import ResponseKey, ResponseRecord, WriteBatch, add_to
from app.journal.store import JournalStore
from app.journal.tables import load_homes, load_responses
from tests.file_sizes import largest_file
from tests.journal.building import FILE, change, execute, filled, histories, model_info, record
from tests.privileges import unprivileged_folder

TOKENS = st.lists(st.integers(0, 511), max_size=6)
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A folder whose files wait for no disk. The machine's journals do so thousands of times, and no power is cut."""


class StoreMachine(RuleBasedStateMachine):
    """Sessions come, grow, are cut, are written anew and go, in batches of any size; a dict is the model."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.path = Path(self.folder.name) / FILE
        self.store = JournalStore(self.path)
        self.store.load(model_info())
        self.batch: WriteBatch = {}
        self.expected: dict[str, list[int]] = {}
        self.used_at: dict[str, float] = {}
        self.made = 0

    def new(self, token_ids: list[int]) -> str:
        self.made += 1
        session = f"ses_{self.made:03}"
        self.note(session, 0, token_ids)
        return session

    def note(self, session: str, position: int, token_ids: list[int]) -> None:
        self.used_at[session] = self.used_at.get(session, 0.0) + 1
        self.expected[session] = self.expected.get(session, [])[:position] + token_ids
        add_to(self.batch, SessionId(session), change(session, position, token_ids, used_at=self.used_at[session]))

    @rule(target=sessions, token_ids=TOKENS)
    def create(self, token_ids: list[int]) -> str:
        return self.new(token_ids)

    @rule(target=sessions, parent=sessions)
    def fork(self, parent: str) -> str:
        return self.new(self.expected[parent])

    @rule(session=sessions, token_ids=TOKENS)
    def append(self, session: str, token_ids: list[int]) -> None:
        self.note(session, len(self.expected[session]), token_ids)

    @rule(session=sessions, share=st.floats(0, 1), token_ids=TOKENS)
    def replace_from(self, session: str, share: float, token_ids: list[int]) -> None:
        self.note(session, int(share * len(self.expected[session])), token_ids)

    @rule(session=consumes(sessions))
    def close(self, session: str) -> None:
        del self.expected[session], self.used_at[session]
        add_to(self.batch, SessionId(session), None)

    @rule()
    def commit(self) -> None:
        self.store.apply(self.batch)
        self.batch = {}

    @rule()
    def reopen(self) -> None:
        self.commit()
        self.store.close()
        self.store = JournalStore(self.path)

    @invariant()
    def what_is_committed_is_what_comes_back(self) -> None:
        if self.batch:
            return
        found = self.store.load(model_info())
        assert {kept.id: list(history) for kept, history in found} == self.expected
        assert [kept for kept, _ in found] == [
            record(session, used_at=self.used_at[session]) for session in sorted(self.expected)
        ]

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(stateful_step_count=25)


def test_a_turn_on_a_long_history_writes_only_its_own_tokens(tmp_path: Path) -> None:
    store = JournalStore(tmp_path / FILE)
    store.load(model_info())
    session = SessionId("ses_1")
    store.apply({session: change(session, 0, [1] * 100_000)})
    before = (tmp_path / f"{FILE}-wal").stat().st_size
    store.apply({session: change(session, 100_000, [2] * 30)})
    written = (tmp_path / f"{FILE}-wal").stat().st_size - before
    store.close()
    assert written < 32_768
    assert histories(tmp_path / FILE) == {session: [1] * 100_000 + [2] * 30}


@pytest.mark.parametrize(
    ("size", "garbage"), [(100, b""), (30_000, b""), (None, b"\xa5" * 4096), (0, b"not a journal at all" * 500)]
)
def test_a_damaged_file_is_named_not_passed_over(tmp_path: Path, size: int | None, garbage: bytes) -> None:
    path = tmp_path / FILE
    filled(path)
    whole = path.read_bytes()
    half = len(whole) // 2
    path.write_bytes(whole[:half] + garbage + whole[half + len(garbage) :] if size is None else whole[:size] + garbage)
    with pytest.raises(FieldOutOfRange, match=str(path)):
        histories(path)


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM tokens WHERE session = 'ses_1' AND position = 500",
        "UPDATE tokens SET ids = substr(ids, 1, 7) WHERE session = 'ses_1' AND position = 0",
        "DELETE FROM session WHERE id = 'ses_1'",
        "UPDATE session SET phase = 'asleep'",
        "UPDATE tokens SET ids = x'00020000' WHERE session = 'ses_1' AND position = 510",
    ],
)
def test_what_cannot_be_a_history_is_not_taken_for_one(tmp_path: Path, sql: str) -> None:
    path = tmp_path / FILE
    filled(path, 2)
    store = JournalStore(path)
    store.apply({SessionId("ses_1"): change("ses_1", 500, range(10))})
    store.apply({SessionId("ses_1"): change("ses_1", 510, [3])})
    store.close()
    execute(path, sql)
    with pytest.raises(FieldOutOfRange, match=str(path)):
        histories(path)


@pytest.mark.parametrize(("version", "age"), [(1, "an older"), (OLDEST - 1, "an older"), (FORMAT + 1, "a newer")])
def test_a_journal_of_another_version_is_said_to_be_one_with_what_to_do(tmp_path: Path, version: int, age: str) -> None:
    path = tmp_path / FILE
    filled(path)
    execute(path, f"PRAGMA user_version = {version}")
    with pytest.raises(FieldOutOfRange, match=f"{age} version of Djinn: .* {version}, .*--state-dir") as refused:
        JournalStore(path)
    assert refused.value.param == "state_dir"


def test_only_the_owner_reads_it_whoever_made_the_folder(tmp_path: Path) -> None:
    path = tmp_path / FILE
    with closing(JournalStore(path)) as store:
        store.load(model_info())
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    path.chmod(0o644)
    JournalStore(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_is_refused_at_start() -> None:
    with unprivileged_folder() as folder:
        path = folder / FILE
        filled(path)
        path.chmod(0o400)
        with pytest.raises(FieldOutOfRange, match=r"cannot write the journal .*: Permission denied; .*--state-dir"):
            JournalStore(path)


def test_a_disk_that_refuses_does_not_make_a_damaged_journal(tmp_path: Path) -> None:
    """What SQLite needs beside the file cannot be made: a quota is used up, or the disk is broken."""
    path = tmp_path / FILE
    filled(path)
    with largest_file(1000), pytest.raises(FieldOutOfRange, match=r"cannot open the journal .*; look at its disk"):
        JournalStore(path)
    assert len(histories(path)) == 50


def test_what_is_left_of_a_journal_is_no_new_one(tmp_path: Path) -> None:
    def refused(says: str) -> None:
        with pytest.raises(FieldOutOfRange, match=says):
            JournalStore(tmp_path / FILE)

    (tmp_path / f"{FILE}-wal").write_bytes(b"something")
    refused("is missing")
    (tmp_path / f"{FILE}-wal").unlink()
    (tmp_path / FILE).touch()
    refused(r"Djinn cannot read the journal .*: it is empty; put back a copy")
    execute(tmp_path / FILE, "PRAGMA journal_mode = WAL")
    refused(r"Djinn cannot read the journal .*: it has no tables; put back a copy")


@pytest.mark.parametrize("other", [model_info("other"), model_info(vocab_size=513)])
def test_another_models_sessions_are_refused_with_what_to_do(tmp_path: Path, other: ModelInfo) -> None:
    filled(tmp_path / FILE)
    with closing(JournalStore(tmp_path / FILE)) as store:
        with pytest.raises(FieldOutOfRange, match=r"50 sessions .* model 'tiny' .*--state-dir"):
            store.load(other)
        assert len(store.load(model_info())) == 50


def test_a_journal_without_sessions_goes_over_to_the_next_model(tmp_path: Path) -> None:
    store = JournalStore(tmp_path / FILE)
    assert store.load(model_info("first")) == store.load(model_info("second")) == []
    store.apply({SessionId("ses_1"): change("ses_1", 0, [1])})
    assert [history for _, history in store.load(model_info("second"))] == [array("I", [1])]
    store.close()


def response(name: str, session: str = "ses_1", body: bytes = b"{}") -> tuple[ResponseKey, ResponseRecord]:
    return ResponseKey(name), ResponseRecord(name, SessionId(session), body)


def kept(path: Path) -> dict[str, bytes]:
    """The bodies that a fresh start finds, by id."""
    with closing(JournalStore(path)) as store:
        return {record.id: record.body for record in store.read(load_responses)}


def test_a_response_is_as_it_was_written_last_until_it_or_its_session_goes(tmp_path: Path) -> None:
    store = JournalStore(tmp_path / FILE)
    store.apply({SessionId("ses_1"): change("ses_1", 0, [1]), SessionId("ses_2"): change("ses_2", 0, [1])})
    store.apply(dict([response("resp_1", "ses_1"), *(response(f"resp_{number}", "ses_2") for number in (2, 3, 4))]))
    store.apply(dict([response("resp_3", "ses_2", body=b'{"n": 1}')]))
    store.apply({ResponseKey("resp_2"): None, ResponseKey("never_there"): None})
    store.apply({SessionId("ses_1"): None})
    store.close()
    assert kept(tmp_path / FILE) == {"resp_3": b'{"n": 1}', "resp_4": b"{}"}


def test_what_a_session_has_brought_is_written_with_it_or_not_at_all(tmp_path: Path) -> None:
    store = JournalStore(tmp_path / FILE)
    store.load(model_info())
    (_, good), (_, bad) = response("resp_1"), response("resp_2")
    home = Home(HomeState.HERE, 1, 1, "a", 0, None, "mine")
    came = replace(change("ses_1", 0, [1]), home=home, responses=(good,))
    lost = replace(change("ses_2", 0, [1]), home=home, responses=(replace(bad, body=None),))  # type: ignore[arg-type]
    refused = store.apply({SessionId("ses_1"): came, SessionId("ses_2"): lost})
    store.close()
    assert refused.keys() == {"ses_2"}
    assert kept(tmp_path / FILE).keys() == {"resp_1"}
    with closing(JournalStore(tmp_path / FILE)) as again:
        assert [record.id for record, _ in again.load(model_info())] == ["ses_1"]
        assert again.read(load_homes).epoch(SessionId("ses_2")) == 0
