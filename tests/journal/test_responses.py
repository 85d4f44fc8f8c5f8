"""Responses in the journal: written, replaced, deleted, and gone with their session."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from app.domain.homes import MOST_KEPT, Home, HomeState
from app.domain.values import SessionId
from app.journal.journal import Journal
from app.journal.records import Departed, ResponseKey, ResponseRecord
from app.journal.store import JournalStore
from tests.journal.building import FILE, change, model_info


def response(name: str, session: str = "ses_1", body: bytes = b"{}") -> tuple[ResponseKey, ResponseRecord]:
    return ResponseKey(name), ResponseRecord(name, SessionId(session), body)


def kept(path: Path) -> dict[str, bytes]:
    """The bodies that a fresh start finds, by id."""
    store = JournalStore(path)
    try:
        return {record.id: record.body for record in store.load_responses()}
    finally:
        store.close()


def test_a_response_is_as_it_was_written_last(tmp_path: Path) -> None:
    store = JournalStore(tmp_path / FILE)
    store.apply(dict([response("resp_1"), response("resp_2", body=b'{"n": 2}')]))
    store.apply(dict([response("resp_1", body=b'{"n": 1}')]))
    store.close()
    assert kept(tmp_path / FILE) == {"resp_1": b'{"n": 1}', "resp_2": b'{"n": 2}'}


def test_a_response_that_is_deleted_is_gone(tmp_path: Path) -> None:
    store = JournalStore(tmp_path / FILE)
    store.apply(dict([response("resp_1"), response("resp_2")]))
    store.apply({ResponseKey("resp_1"): None, ResponseKey("never_there"): None})
    store.close()
    assert kept(tmp_path / FILE).keys() == {"resp_2"}


def test_the_responses_of_a_session_go_with_it(tmp_path: Path) -> None:
    store = JournalStore(tmp_path / FILE)
    store.apply({SessionId("ses_1"): change("ses_1", 0, [1]), SessionId("ses_2"): change("ses_2", 0, [1])})
    store.apply(dict([response("resp_1", "ses_1"), response("resp_2", "ses_1"), response("resp_3", "ses_2")]))
    store.apply({SessionId("ses_1"): None})
    store.close()
    assert kept(tmp_path / FILE).keys() == {"resp_3"}


async def test_what_is_settled_is_on_disk(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.load(model_info())
    assert journal.load_responses() == []
    journal.start()
    key, record = response("resp_1")
    journal.append(key, record)
    await journal.settled()
    assert kept(tmp_path / FILE).keys() == {"resp_1"}
    journal.close()


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
        assert again.load_homes().epoch(SessionId("ses_2")) == 0


def test_where_responses_have_gone_is_known_until_their_session_is_forgotten(tmp_path: Path) -> None:
    store, one = JournalStore(tmp_path / FILE), SessionId("ses_1")
    store.apply({one: change("ses_1", 0, [1])})
    store.apply(dict([response("resp_1")]))
    gone = Home(HomeState.GONE, 1, 1, "b", 0, None, "mine")
    store.apply({one: Departed(gone, ("resp_1",))})
    homes = store.load_homes()
    assert (homes.gone_by_response("resp_1"), homes.gone_by_name(None, "mine")) == (one, one)
    store.apply({SessionId("ses_2"): Departed(replace(gone, seq=1 + MOST_KEPT, name=None))})
    homes = store.load_homes()
    store.close()
    assert (homes.gone_by_response("resp_1"), homes.gone_by_name(None, "mine")) == (None, None)
    assert kept(tmp_path / FILE) == {}
