"""The files that make a server one of a cluster: what is in them, and what is refused."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.cluster.moves.key import ClusterKey
from app.cluster.moves.peers import Peers
from app.domain.errors import FieldOutOfRange
from app.machine.handover import SocketTable, receive_sockets, send_socket
from app.settings import Settings, settings

FILES: dict[str, Any] = {"peers": "peers.yaml", "cluster_key_file": "key"}


def test_the_peers_are_yaml_or_json(tmp_path: Path) -> None:
    path = tmp_path / "peers"
    for text in ("a: http://10.0.0.1:8000/\nb: http://host\n", '{"a": "http://10.0.0.1:8000", "b": "http://host"}'):
        path.write_text(text)
        peers = Peers(path)
        assert peers.urls == {"a": "http://10.0.0.1:8000", "b": "http://host"}
        found = peers.find("a"), peers.find("b"), peers.find("c")
        assert [each and each.address for each in found] == [("10.0.0.1", 8000), ("host", 80), None]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a", "names of servers"),
        ("a: [", "invalid YAML"),
        ("A: http://host", "no name of a server"),
        ("a: https://host", "must be a URL"),
        ("a: http://host/path", "must be a URL"),
        ("a: 5", "must be a URL"),
    ],
)
def test_a_file_with_a_mistake_is_refused_and_leaves_the_peers(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "peers"
    path.write_text("b: http://host")
    peers = Peers(path)
    path.write_text(text)
    with pytest.raises(FieldOutOfRange, match=problem):
        Peers(path)
    peers.reload()
    assert peers.urls == {"b": "http://host"}
    path.write_text("c: http://host")
    peers.reload()
    assert peers.urls == {"c": "http://host"}


def test_a_key_is_long_enough_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("short secret")
    with pytest.raises(FieldOutOfRange, match="from 32 to 4096") as refused:
        ClusterKey.read(path)
    assert "secret" not in refused.value.message.replace(str(path), "")
    with pytest.raises(FieldOutOfRange, match="cannot be read"):
        ClusterKey.read(tmp_path / "nothing")
    path.write_text(f"  {'x' * 32}\n")
    key = ClusterKey.read(path)
    signature = key.sign(b"a", b"bc")
    assert key.has_signed(signature, b"a", b"bc")
    assert ClusterKey(b"x" * 32).has_signed(signature, b"a", b"bc")
    for other in ((b"ab", b"c"), (b"a", b"bc", b""), (b"a",)):
        assert not key.has_signed(signature, *other)
    assert not ClusterKey(b"y" * 32).has_signed(signature, b"a", b"bc")


@pytest.mark.parametrize("missing", [*FILES, "replica"])
def test_one_setting_of_a_cluster_needs_the_others(missing: str) -> None:
    whole = {**FILES, "replica": "a"}
    assert Settings(**whole).peers == Path("peers.yaml")
    with pytest.raises(ValidationError, match="needs"):
        Settings(**{name: value for name, value in whole.items() if name != missing})


@pytest.mark.parametrize(
    ("given", "says"),
    [({"role": "prefill"}, "role: needs peers"), ({**FILES, "replica": "a", "state_dir": None}, "survive a restart")],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Settings(**given)


def test_a_transport_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings(prefill_transport="nixl").prefill_transport == "nixl"
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    with pytest.raises(ValidationError, match=r"prefill_transport: NIXL is not installed: pip install 'djinn\[nixl\]'"):
        Settings(prefill_transport="nixl")


def test_a_socket_goes_to_whoever_knows_its_number() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    table = SocketTable()
    ours, theirs = socket.socketpair()
    unwanted, other_end = socket.socketpair()
    with here, there, theirs, other_end:
        table.discard(4)
        with ours, unwanted:
            send_socket(here, 3, ours)
            send_socket(here, 4, unwanted)
        here.shutdown(socket.SHUT_WR)
        receive_sockets(there, table)
        with table.take(3) as found:
            found.sendall(b"it is I")
        assert theirs.recv(100) == b"it is I"
        assert other_end.recv(1) == b"", "nobody wants it: it is closed"
    table.close()


def test_a_socket_that_comes_too_late_is_closed() -> None:
    table = SocketTable()
    ours, theirs = socket.socketpair()
    with theirs:
        with pytest.raises(OSError, match="has not come"), table.take(3, wait_s=0.0):
            pass
        table.put(3, ours)
        assert theirs.recv(1) == b"", "nobody takes it any more"


def test_whoever_uses_a_socket_of_a_closed_table_learns_of_its_end() -> None:
    table = SocketTable()
    ours, theirs = socket.socketpair()
    table.put(3, ours)
    with theirs, table.take(3) as found:
        table.close()
        assert found.recv(1) == b""
    late, other_end = socket.socketpair()
    with other_end:
        table.put(4, late)
        assert other_end.recv(1) == b""
        with pytest.raises(OSError, match="has not come"), table.take(5):
            pass
