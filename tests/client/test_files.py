"""Sessions that leave for a file and come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import client
from client import Djinn
from tests.client.conftest import AnswerWith


@pytest.fixture
def used(djinn: Djinn) -> Iterator[client.Session]:
    with djinn.sessions.create(metadata={"task": "7"}) as session:
        session.generate(token_ids=list(range(5, 45)), max_tokens=4, temperature=0, ignore_eos=True)
        yield session


def test_a_session_comes_back_from_its_file(djinn: Djinn, used: client.Session, tmp_path: Path) -> None:
    used.export_to(tmp_path / "session")
    assert list(tmp_path.iterdir()) == [tmp_path / "session"]
    with djinn.sessions.import_from(str(tmp_path / "session")) as back:
        assert back.id != used.id
        assert (back.info.metadata, back.info.tokens) == ({"task": "7"}, used.refresh().tokens)
        turns = [each.generate(token_ids=[9], max_tokens=4, temperature=0, ignore_eos=True) for each in (back, used)]
        assert turns[0].token_ids == turns[1].token_ids


def test_what_cannot_be_exported_leaves_no_file(djinn: Djinn, tmp_path: Path) -> None:
    session = djinn.sessions.create()
    session.close()
    (tmp_path / "session").write_bytes(b"before")
    with pytest.raises(client.NotFound):
        session.export_to(tmp_path / "session")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("session", b"before")]


def test_a_broken_download_leaves_no_file(djinn: Djinn, answer_with: AnswerWith, tmp_path: Path) -> None:
    info = djinn.sessions.create().info
    with Djinn(answer_with(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")) as broken:
        session = client.Session(broken.sessions._transport, info)
        with pytest.raises(client.ConnectionLost):
            session.export_to(tmp_path / "session")
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_refused(djinn: Djinn, used: client.Session, tmp_path: Path) -> None:
    path = tmp_path / "session"
    used.export_to(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(client.Unprocessable, match="bytes"):
        djinn.sessions.import_from(path)


def test_a_file_that_is_not_there_is_an_os_error(djinn: Djinn, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        djinn.sessions.import_from(tmp_path / "session")
