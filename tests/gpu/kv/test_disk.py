"""The folder of the disk tier: what it finds at start, what it takes over, and that it stays inside."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.errors import FieldOutOfRange
from app.domain.values import SessionId
from app.gpu.kv.disk import DiskStore
from app.gpu.kv.file import write_kv_file
from app.gpu.kv.header import KVFileDamaged, KVFileMismatch, KVFileTooLarge, file_bytes
from app.machine.disk import DiskFull, DiskRoom
from tests.gpu.kv import kv_files
from tests.gpu.kv.kv_files import IDENTITY, blocks_of, buffers_for, damage, same
from tests.privileges import unprivileged_folder

HEADER = replace(kv_files.HEADER, about_bytes=0)
ONE, TWO = SessionId("ses_1"), SessionId("ses_2")


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "state" / "kv", IDENTITY)


def reopened(store: DiskStore) -> DiskStore:
    return DiskStore(store.path(ONE).parent, IDENTITY)


def test_a_folder_that_cannot_be_written_is_refused_at_start() -> None:
    with unprivileged_folder() as state:
        folder = state / "kv"
        folder.mkdir(mode=0o500)
        with pytest.raises(FieldOutOfRange, match=rf"cannot keep KV in {folder}: Permission denied.*--state-dir"):
            DiskStore(folder, IDENTITY)


def test_a_session_is_there_until_it_is_deleted(store: DiskStore) -> None:
    size = store.write(ONE, HEADER, blocks_of(HEADER))
    assert size == file_bytes(HEADER) == store.path(ONE).stat().st_size
    for private in (store.path(ONE), store.path(ONE).parent):
        assert private.stat().st_mode & 0o077 == 0
    into = buffers_for(HEADER)
    assert same(store.read(ONE, into), HEADER)
    assert into == blocks_of(HEADER)
    store.delete(ONE)
    store.delete(ONE)
    with pytest.raises(FileNotFoundError):
        store.read(ONE, into)


def test_what_cannot_be_used_is_named_and_left_until_its_session_has_had_its_say(store: DiskStore) -> None:
    foreign = replace(HEADER, identity=replace(IDENTITY, fingerprint="model-b"))
    store.write(ONE, HEADER, blocks_of(HEADER))
    store.write(TWO, foreign, blocks_of(foreign))
    cut = store.path(SessionId("ses_3"))
    cut.write_bytes(store.path(ONE).read_bytes()[:-1])
    half_written = cut.with_suffix(".tmp")
    half_written.write_bytes(b"half")
    found = reopened(store).index()
    assert (list(found.headers), found.refused) == ([ONE], [TWO, SessionId("ses_3")])
    assert same(found.headers[ONE], HEADER)
    assert sorted(cut.parent.iterdir()) == [store.path(ONE), store.path(TWO), cut]


@given(session=st.text(st.characters(codec="utf-8"), max_size=12).map(SessionId))
def test_no_id_leads_out_of_the_folder_or_to_another_session(
    tmp_path_factory: pytest.TempPathFactory, session: SessionId
) -> None:
    folder = tmp_path_factory.getbasetemp() / "ids"
    store = DiskStore(folder, IDENTITY)
    path = store.path(session)
    assert os.path.normpath(path) == str(folder / path.name)
    store.write(session, HEADER, blocks_of(HEADER))
    assert list(store.index().headers) == [session]
    store.delete(session)


def test_no_file_takes_from_the_reserve(store: DiskStore) -> None:
    folder = store.path(ONE).parent
    close = DiskStore(folder, IDENTITY, DiskRoom(folder, 1 << 62))
    with pytest.raises(DiskFull, match="kept for the journal"):
        close.write(ONE, HEADER, blocks_of(HEADER))
    assert list(folder.iterdir()) == []


EXPORT = replace(HEADER, namespace=b"")


@pytest.fixture
def upload(tmp_path: Path) -> Path:
    write_kv_file(tmp_path / "upload", EXPORT, blocks_of(HEADER))
    return tmp_path / "upload"


def test_an_adopted_file_has_moved(store: DiskStore, upload: Path) -> None:
    assert same(store.adopt(upload, TWO, max_tokens=6), EXPORT)
    assert not upload.exists()
    into = buffers_for(HEADER)
    store.read(TWO, into)
    assert into == blocks_of(HEADER)


def test_a_file_is_adopted_across_file_systems(store: DiskStore) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == store.path(ONE).parent.stat().st_dev:
        pytest.skip("there is no second file system")
    upload = memory / f"djinn-test-{os.getpid()}"
    write_kv_file(upload, EXPORT, blocks_of(HEADER))
    store.adopt(upload, TWO, max_tokens=6)
    assert not upload.exists()
    assert same(store.read(TWO, buffers_for(HEADER)), EXPORT)


def test_a_copy_that_fails_leaves_no_file(store: DiskStore, upload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_disk(_source: object, target: Path) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(shutil, "move", fill_disk)
    with pytest.raises(OSError, match="no room"):
        store.adopt(upload, TWO, max_tokens=6)
    assert upload.exists()
    assert list(store.path(TWO).parent.iterdir()) == []


def test_a_file_with_more_tokens_than_a_session_may_have_is_not_adopted(store: DiskStore, upload: Path) -> None:
    with pytest.raises(KVFileTooLarge, match=r"token_ids .* from 0 to 5$"):
        store.adopt(upload, TWO, max_tokens=5)
    assert store.index().headers == {}


def test_a_bad_file_is_not_adopted(store: DiskStore, upload: Path) -> None:
    write_kv_file(upload, HEADER, blocks_of(HEADER))
    with pytest.raises(KVFileDamaged, match="namespace"):
        store.adopt(upload, TWO, max_tokens=6)
    damage(upload, -40)
    with pytest.raises(KVFileDamaged, match="checksum"):
        store.adopt(upload, TWO, max_tokens=6)
    foreign = replace(HEADER, identity=replace(IDENTITY, fingerprint="model-b"))
    write_kv_file(upload, foreign, blocks_of(foreign))
    with pytest.raises(KVFileMismatch):
        store.adopt(upload, TWO, max_tokens=6)
    assert upload.exists()
    assert store.index().headers == {}
