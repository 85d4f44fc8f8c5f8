"""Copies of a state folder: no turn that was answered is missing."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from app import backup
from app.cli import main
from app.journal.journal import FILE_NAME
from app.journal.migrations import copy_journal
from tests.durability.restarting import TOKENS, generate, open_session, serving
from tests.journal.building import filled
from tests.orderly import serve_thread
from tests.privileges import unprivileged_folder
from tests.waiting import wait_until

PROMPT = [5, 6, 7]
AGENTS = 6
MOST = 60
"""Turns of an agent: they fit its context."""


def test_no_turn_is_missing_that_was_answered_before(tmp_path: Path) -> None:
    folder, copy = tmp_path / "state", tmp_path / "backups" / "monday"
    is_over, answered = threading.Event(), dict[str, list[int]]()

    def talk() -> None:
        session = open_session(http)
        for _ in range(MOST):
            if is_over.is_set():
                break
            tokens = generate(http, session, PROMPT)["token_ids"]
            answered[session] = [*answered.get(session, []), *PROMPT, *tokens]

    with serving(folder) as http, ThreadPoolExecutor(AGENTS) as agents:
        talks = [agents.submit(talk) for _ in range(AGENTS)]
        wait_until(lambda: len(answered) == AGENTS)
        before = dict(answered)
        assert main(["backup", "--state-dir", str(folder), "--with-kv", str(copy)]) == 0
        is_over.set()
        for each in talks:
            each.result()
    with serving(copy) as http:
        for session, tokens in before.items():
            found = http.get(f"/v1/sessions/{session}/history").json()["token_ids"]
            assert found[: len(tokens)] == tokens
            generate(http, session, PROMPT)


def test_uploads_come_with_it_and_kv_if_it_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serve_thread(folder) as (_, http):
        session = open_session(http)
        generate(http, session, PROMPT)
        weights, form = save({"0.weight": np.eye(64, dtype="f4")}), {"name": "mine", "kind": "tuned"}
        lens = http.post("/v1/lenses", data=form, files={"weights": weights}).raise_for_status().json()
    for name, flags in (("journal", []), ("all", ["--with-kv"])):
        assert main(["backup", "--state-dir", str(folder), *flags, str(tmp_path / name)]) == 0
    recomputed = {}
    for name in ("journal", "all"):
        with serving(tmp_path / name) as http:
            assert http.get("/v1/lenses/mine").json() == lens
            recomputed[name] = generate(http, session, [9])["usage"]["tokens_recomputed"]
    assert recomputed == {"journal": len(PROMPT) + TOKENS - 1, "all": 0}
    with serving(folder) as http:  # serving a copy has taken nothing from what it is of
        assert generate(http, session, [9])["usage"]["tokens_recomputed"] == 0


def test_both_folders_stay_as_they_were(tmp_path: Path) -> None:
    """A disk may be mounted where the target is, which cannot be replaced."""
    folder, target = tmp_path / "state", tmp_path / "copy"
    with serving(folder) as http:
        open_session(http)
    target.mkdir()
    before = sorted(path.name for path in folder.iterdir()), target.stat().st_ino
    assert main(["backup", "--state-dir", str(folder), "--with-kv", str(target)]) == 0
    assert (sorted(path.name for path in folder.iterdir()), target.stat().st_ino) == before
    assert not any(path.name.startswith(".") for path in target.iterdir())
    assert main(["backup", "--state-dir", str(folder), str(tmp_path / "new")]) == 0
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
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


@pytest.mark.parametrize(
    ("closed", "flags"), [("state", []), ("state/kv", ["--with-kv"]), ("backups", []), ("backups/copy", [])]
)
def test_a_folder_that_may_not_be_read_is_named_with_its_owner(
    capsys: pytest.CaptureFixture[str], closed: str, flags: list[str]
) -> None:
    with unprivileged_folder() as folder:
        for each in ("state/kv", "backups/copy"):
            (folder / each).mkdir(parents=True)
        filled(folder / "state" / FILE_NAME)
        (folder / closed).chmod(0)
        arguments = ["backup", "--state-dir", str(folder / "state"), *flags, str(folder / "backups/copy")]
        assert main(arguments) == 2
        (folder / closed).chmod(0o700)
        told = capsys.readouterr().err
        assert "Permission denied" in told
        assert f"{folder / closed} belongs to user {os.geteuid()}, this process runs as user {os.geteuid()}" in told
        assert list((folder / "backups").iterdir()) == [folder / "backups/copy"]
        assert main(arguments) == 0


def with_kv(folder: Path) -> Path:
    """A state folder with a journal and a file of KV."""
    (folder / "kv").mkdir(parents=True)
    (folder / "kv/a.safetensors").write_bytes(b"KV")
    filled(folder / FILE_NAME)
    return folder


def meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """What happens once the journal has been copied."""

    def copied(source: Path, target: Path) -> int:
        sessions = copy_journal(source, target)
        happens()
        return sessions

    monkeypatch.setattr(backup, "copy_journal", copied)


def test_what_fails_half_way_leaves_the_folder_for_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, target = with_kv(tmp_path / "state"), tmp_path / "copy"
    target.mkdir()
    arguments = ["backup", "--state-dir", str(folder), "--with-kv", str(target)]
    with monkeypatch.context() as patch:
        meanwhile(patch, (target / FILE_NAME).mkdir)  # the last of what moves up finds its place taken
        assert main(arguments) == 2
    assert "cannot be made" in capsys.readouterr().err
    assert [path.name for path in target.iterdir()] == [FILE_NAME]
    (target / FILE_NAME).rmdir()
    assert main(arguments) == 0
    assert sorted(path.name for path in target.iterdir()) == [FILE_NAME, "kv"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_backup_that_is_told_to_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    folder, target = with_kv(tmp_path / "state"), tmp_path / "copy"
    if is_there:
        target.mkdir()

    def told_to_end() -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # it would be the end of the tests
        os.kill(os.getpid(), signal.SIGTERM)

    meanwhile(monkeypatch, told_to_end)
    with pytest.raises(SystemExit) as ended:
        main(["backup", "--state-dir", str(folder), str(target)])
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert [path for path in left if not path.startswith("state")] == ["copy"] * is_there


@pytest.mark.parametrize("is_there", [True, False])
def test_a_power_cut_after_it_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    folder, target = with_kv(tmp_path / "state"), tmp_path / "copy"
    if is_there:
        target.mkdir()
    synced, fsync = list[int](), os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    assert main(["backup", "--state-dir", str(folder), "--with-kv", str(target)]) == 0
    files = [target / FILE_NAME, target / "kv", target / "kv/a.safetensors"]
    assert {path.stat().st_ino for path in files} <= set(synced)
    assert synced[-1] == (target if is_there else tmp_path).stat().st_ino  # the names, once they are there
