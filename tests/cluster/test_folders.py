"""Folders that are empty, old, copied or given up: no server serves what another one has. What else an operator does
with replicas: hangs up, and reads the audit log.
"""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.cli import main
from app.cluster import claims
from app.domain.errors import FieldOutOfRange
from tests.cluster.etcd import Etcd
from tests.cluster.pair import Chain, Chat, Pair, behind, code, free_port, named, pair, sdk, used_session
from tests.durability.restarting import generate
from tests.processes import serve_process
from tests.tenants.tenant_files import tenant, write_tenants
from tests.tenants.test_keys import bearer
from tests.waiting import wait_until


@pytest.fixture(params=["folder", "etcd"])
def both(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two servers, on each kind of store."""
    monkeypatch.setattr(claims, "PATIENCE_S", 0.0)  # what lives, lives
    etcd: Etcd | None = request.getfixturevalue("etcd") if request.param == "etcd" else None
    store = None if etcd is None else f"{etcd.url}/{tmp_path.name}"
    with pair(tmp_path, store=store) as found:
        yield found


def refused(both: Pair) -> str:
    """Why `a` cannot start. It would listen elsewhere: another one may be at its port."""
    with pytest.raises((FieldOutOfRange, RuntimeError)) as error:
        both.start("a", "--port", str(free_port()))
    return str(error.value)


def command(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command that operators use says."""
    main(["cluster", *words])
    return "".join(capsys.readouterr())


def test_an_empty_or_old_folder_is_refused_and_the_right_one_goes_on(both: Pair, tmp_path: Path) -> None:
    moved, stays = used_session(both.a), used_session(both.a)
    folder, away, old = tmp_path / "a", tmp_path / "away", tmp_path / "old"
    shutil.copytree(folder, old)
    both.moved(moved)
    shutil.copytree(folder, tmp_path / "copy")
    folder.rename(away)
    (tmp_path / "copy").rename(folder)
    assert "not ended in order" in refused(both)  # a copy, beside the living one
    both.end("a")  # in order
    shutil.rmtree(folder)
    assert "is its volume mounted?" in refused(both)  # an empty one
    shutil.rmtree(folder)
    old.rename(folder)
    assert all("older copy" in refused(both) for _ in range(3))  # of before the move, however often it is started
    shutil.rmtree(folder)
    away.rename(folder)
    both.start("a")
    assert (both.owners(moved), both.owners(stays)) == (["b"], ["a"])
    assert generate(both.b, moved, [9])["token_ids"]


def test_a_copy_of_a_folder_whose_server_was_killed_needs_an_operators_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a"
    with pair(tmp_path, as_processes=True) as both:
        moved, stays = used_session(both.a), used_session(both.a)
        both.end("a")
        both.start("a")  # at once: it is known to be dead
        both.moved(moved)
        both.end("a")
        folder.rename(tmp_path / "lost")
        shutil.copytree(tmp_path / "lost", folder)
        assert "not ended in order" in refused(both)
        assert "a may be started again" in command(capsys, "ended", "a", "--cluster", both.store)
        both.start("a")
        assert (both.owners(moved), both.owners(stays)) == (["b"], ["a"])


def test_a_name_is_another_servers_once_the_old_one_is_forgotten(
    both: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lives, lost, chain = Chat("lives"), Chat("lost"), Chain("chain")
    both.start("c")
    for door in "ac":  # which remembers where they are
        with sdk(both.urls[door]) as client:
            for each in (lives, lost, chain):
                each.say(client, "Hello")
    assert [both.owners(each.session) for each in (lives, lost, chain)] == [["a"]] * 3
    for each in (lives, chain):
        both.moved(each.session)
    assert "a lives, at http://" in command(capsys, "forget", "a", "--cluster", both.store)
    both.end("a")
    (tmp_path / "a").rename(tmp_path / "old")
    assert "djinn cluster forget a" in refused(both)
    assert "a is forgotten" in command(capsys, "forget", "a", "--cluster", both.store)
    both.start("a")
    for door in "ca":
        assert httpx.get(f"{both.urls[door]}/v1/sessions/{lives.session}").status_code == 200
        with sdk(both.urls[door]) as client:
            assert min(each.say(client, "How are you?").cached for each in (lives, chain)) > 0
    assert [named(http, "lives") for http in both.clients.values()] == [[lives.session], [], []]
    with sdk(both.urls["a"]) as client:
        gone = f"{both.urls['b']}/v1/sessions/{lost.session}"
        wait_until(lambda: code(httpx.get(gone)) == (404, "not_found"))  # a busy machine may take `a` to be away
        assert Chat("lost").say(client, "Hello").cached == 0
    both.end("a")
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "old").rename(tmp_path / "a")
    assert "was given up by djinn cluster forget" in refused(both)


def test_a_replica_without_files_goes_on_when_it_hears_a_hangup(tmp_path: Path) -> None:
    """Its keeper passes on what it hears."""
    with serve_process(tmp_path / "state", "--replica", "a") as server:
        os.kill(server.pid, signal.SIGHUP)
        assert server.exit_status(0.3) is None
        assert httpx.get(f"{server.url}/ready").status_code == 200


def test_a_request_leaves_one_line_in_the_audit_log_where_it_was_made(tmp_path: Path) -> None:
    file, logs = write_tenants(tmp_path / "tenants.json", tenant("acme")), {}
    with pair(tmp_path / "pair", start=False) as servers:
        for name in ("a", "b"):
            logs[name] = tmp_path / f"{name}.jsonl"
            servers.start(name, "--tenants", str(file), "--audit-log", str(logs[name]))
        servers.headers = bearer("acme")
        with behind(servers, "b") as http:
            session = servers.a.post("/v1/sessions", json={}, headers=bearer("acme")).json()["id"]
            for path in (f"/v1/sessions/{session}", "/v1/memory"):
                wait_until(lambda path=path: http.get(path).is_success)  # type: ignore[misc]
            wait_until(lambda: "/v1/memory" in logs["b"].read_text())
        assert logs["a"].read_text() == ""
        every = [json.loads(line) for line in logs["b"].read_text().splitlines()]
        lines = [line for line in every if (line["method"], line["status"]) == ("GET", 200)]
    paths = ["/v1/sessions/{session_id}", "/v1/memory"]
    assert [(line["tenant"], line["path"]) for line in lines] == [("acme", path) for path in paths]
    assert lines[0]["session"] == session
