"""Servers with the cluster's key move sessions, and operators ask for it; others cannot. A move that is recorded and
sent again changes nothing. Mistakes in a cluster's settings are refused.
"""

import contextlib
import hashlib
import http.client
import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import msgspec
import pytest
from pydantic import ValidationError

from app.cluster.key import DIGEST, SIGNATURE, ClusterKey, sign_request
from app.cluster.moves import departures
from app.cluster.moves.talk import OFFER, SETTLE, Answer, Question, encode
from app.domain.errors import FieldOutOfRange
from app.domain.homes import Taken, home_of_response
from app.domain.values import SessionId
from app.main import load_app
from app.settings import Settings
from tests.cluster.pair import KEY, PROMPT, SOON_S, Chain, Pair, alone, code, pair, sdk, used_session
from tests.durability.restarting import generate, open_session
from tests.serving import serve, tiny_settings
from tests.tenants.tenant_files import tenant, write_tenants

BODY = encode(Question(SessionId("ses_b_1"), 1, 0, ""))


def ask(servers: Pair, headers: dict[str, str], path: str = SETTLE, body: bytes = BODY) -> httpx.Response:
    return servers.b.post(path, content=body, headers=headers)


def test_nothing_else_does(servers: Pair) -> None:
    key, other = ClusterKey(KEY.encode()), ClusterKey(b"another secret that is long enough too")
    good = sign_request(key, "b", SETTLE, BODY)
    changed = encode(Question(SessionId("ses_b_2"), 1, 0, ""))
    forged = [
        ({}, SETTLE, BODY),
        (sign_request(other, "b", SETTLE, BODY), SETTLE, BODY),
        (sign_request(key, "a", SETTLE, BODY), SETTLE, BODY),
        (good, OFFER, BODY),
        (good, SETTLE, changed),
        ({**good, DIGEST: hashlib.sha256(changed).hexdigest()}, SETTLE, changed),
        ({**good, SIGNATURE: ""}, SETTLE, BODY),
        ({"authorization": f"Bearer {KEY}"}, SETTLE, BODY),
    ]
    for headers, path, body in forged:
        answer = ask(servers, headers, path, body)
        assert code(answer) == (401, "invalid_api_key")
        assert KEY not in answer.text
    assert code(servers.b.get(SETTLE)) == (404, "not_found")
    assert code(ask(servers, good, "/v1/cluster/else")) == (404, "not_found")


def test_a_peer_that_is_away_or_another_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(tmp_path, start=False, flags={"b": ("--model", "random:tiny-gpt2")}) as servers:
        a = servers.start("a")
        session = used_session(a)
        assert code(servers.move(session)) == (422, "unknown_replica")
        servers.start("b")
        assert code(servers.move(session)) == (409, "peer_mismatch")
        ours, theirs = socket.socketpair()
        with monkeypatch.context() as patch, theirs:
            patch.setattr(departures, "connect", AsyncMock(return_value=(ours, "nonsense")))
            assert code(servers.move(session)) == (409, "peer_mismatch")
            assert theirs.recv(1) == b"", "the connection is closed"
        assert servers.owners(session) == ["a"]
        servers.end("b")
        away = servers.move(session)
        assert code(away) == (503, "peer_away")
        assert "Retry-After" in away.headers


def test_without_a_cluster_nothing_moves_and_nobody_is_told(server_url: str) -> None:
    with httpx.Client(base_url=server_url) as http:
        session = open_session(http)
        assert code(http.post(f"/v1/sessions/{session}/move", json={"replica": "b"})) == (409, "no_cluster")
        assert http.get(f"/v1/sessions?after=ses_{'0' * 36}").status_code == 422


def test_only_an_operator_moves_a_session_and_its_tenant_finds_it(tmp_path: Path) -> None:
    with pair(tmp_path, start=False) as servers:
        everybody = [tenant("boss", role="operator"), tenant("ann"), tenant("bob")]
        tenants = write_tenants(tmp_path / "tenants.json", *everybody)
        less = write_tenants(tmp_path / "less.json", everybody[0], everybody[2])
        servers.headers = {"X-Api-Key": "ann"}
        a, b = servers.start("a", "--tenants", str(tenants)), servers.start("b", "--tenants", str(tenants))
        chain, bobs, boss, bob = Chain("ours"), Chain("ours"), {"X-Api-Key": "boss"}, {"X-Api-Key": "bob"}
        with sdk(servers.urls["a"], api_key="ann", headers=alone("a")) as client:
            chain.say(client, "One")

        def move(session: str, key: dict[str, str]) -> httpx.Response:
            return a.post(f"/v1/sessions/{session}/move", json={"replica": "b"}, headers=key)

        assert code(move(chain.session, {})) == (403, "wrong_role")
        assert move(chain.session, boss).status_code == 200
        assert code(a.get(f"/v1/sessions/{chain.session}", headers=boss)) == (421, "moved")
        for path in (f"/v1/sessions/{chain.session}", f"/v1/responses/{chain.ids[0]}"):
            assert code(a.get(path)) == (421, "moved")
            assert b.get(path).status_code == 200
            for server in (a, b):
                assert code(server.get(path, headers=bob)) == (404, "not_found"), "it is no business of others"
        with sdk(servers.urls["a"], api_key="bob", headers=alone("a")) as client:
            bobs.say(client, "One")
        assert move(bobs.session, boss).status_code == 200, "the same name of another tenant is another name"
        servers.end("b")
        servers.start("b", "--tenants", str(less))
        session = open_session(a)
        assert code(move(session, boss)) == (409, "peer_mismatch")
        assert a.get(f"/v1/sessions/{session}").status_code == 200


def test_what_a_replica_makes_names_it() -> None:
    with serve(replica="a") as url, httpx.Client(base_url=url, timeout=60) as http:
        made = http.post("/v1/responses", json={"model": "tiny-llama", "input": "hi", "max_output_tokens": 1}).json()
        assert home_of_response(made["id"]) == "a"
        assert len(http.get(f"/v1/sessions?after=ses_a_{'0' * 36}").json()["data"]) == 1
        # The list of a cluster has others' sessions, and a page may begin behind one of them.
        assert http.get(f"/v1/sessions?after=ses_b_{'0' * 36}").json() == {"data": [], "has_more": False}
        assert http.get("/v1/sessions?after=nonsense").status_code == 422


def test_a_key_is_long_enough_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(FieldOutOfRange, match="cannot be read"):
        ClusterKey.read(path)
    path.write_text("short secret")
    with pytest.raises(FieldOutOfRange, match="from 32 to 4096") as refused:
        ClusterKey.read(path)
    assert "secret" not in refused.value.message.replace(str(path), "")
    path.write_text(f"  {'x' * 32}\n")
    key = ClusterKey.read(path)
    signature = ClusterKey(b"x" * 32).sign(b"a", b"bc")
    assert key.has_signed(signature, b"a", b"bc")
    for other in ((b"ab", b"c"), (b"a", b"bc", b""), (b"a",)):
        assert not key.has_signed(signature, *other)
    assert not ClusterKey(b"y" * 32).has_signed(signature, b"a", b"bc")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"cluster": None}, "needs"),
        ({"cluster_key_file": None}, "needs"),
        ({"replica": None}, "needs"),
        ({"state_dir": None}, "survive a restart"),
        ({"cluster": None, "cluster_key_file": None, "role": "prefill"}, "role: needs cluster"),
        ({"cluster": None, "cluster_key_file": None, "advertise": "http://host:1"}, "advertise: needs cluster"),
        ({"host": "0.0.0.0"}, "advertise: other servers cannot reach"),
        ({"port": 0}, "advertise: other servers cannot reach"),
        ({"cluster": "etcd://127.0.0.1:1,10.0.0.9:1"}, "advertise: servers on other machines cannot reach"),
        ({"advertise": "https://host"}, "must be a URL such as"),
        ({"advertise": "http://host/path"}, "must be a URL such as"),
    ],
)
def test_settings_of_a_cluster_need_each_other(changed: dict[str, Any], says: str) -> None:
    whole: dict[str, Any] = {"cluster": "folder:x", "cluster_key_file": "key", "replica": "a"}
    assert Settings(**whole).url == "http://127.0.0.1:8000"
    assert Settings(**whole, host="0.0.0.0", advertise="http://host:1/").url == "http://host:1"
    assert Settings(**{**whole, "cluster": "etcd://me:word@[::1]:1,localhost:1/x"}).url == "http://127.0.0.1:8000"
    with pytest.raises(ValidationError, match=says):
        Settings(**{**whole, **changed})


# A move that is recorded and sent again.


class Listener(socketserver.ThreadingTCPServer):
    """A proxy between two servers: it records their messages, and drops the first that the test names."""

    daemon_threads = True

    def __init__(self, there: int, loses: str) -> None:
        super().__init__(("127.0.0.1", 0), Ear)
        self.there = there
        self.loses = loses.encode()
        self.said: list[bytearray] = []

    def heard(self, path: str) -> bytes:
        """All from the first request for that path on, on its connection."""
        found = next(said for said in self.said if f"POST {path} ".encode() in said)
        return bytes(found[found.index(f"POST {path} ".encode()) :])


class Ear(socketserver.BaseRequestHandler):
    server: Listener

    def handle(self) -> None:
        """Pass on both ways what comes, until one end closes it."""
        said = bytearray()
        self.server.said.append(said)
        with socket.create_connection(("127.0.0.1", self.server.there)) as there:
            back = threading.Thread(target=self._pass, args=(there, self.request, bytearray()))
            back.start()
            self._pass(self.request, there, said)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket, said: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                said += data
                if self.server.loses and self.server.loses in said:
                    self.server.loses = b""
                    break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def listened(folder: Path, loses: str) -> Iterator[tuple[Pair, Listener]]:
    """Servers of which `a` reaches `b` through a listener."""
    with pair(folder, start=False) as servers, Listener(servers.ports["b"], loses) as listener:
        threading.Thread(target=listener.serve_forever).start()
        try:
            servers.start("a")
            servers.start("b", "--advertise", f"http://127.0.0.1:{listener.server_address[1]}")
            yield servers, listener
        finally:
            listener.shutdown()


def say(servers: Pair, said: bytes) -> tuple[socket.socket, http.client.HTTPResponse]:
    """Say it to `b`, which answers."""
    connection = socket.create_connection(("127.0.0.1", servers.ports["b"]), SOON_S)
    connection.sendall(said)
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return connection, answer


def test_what_is_repeated_is_not_taken_and_publishes_nothing(tmp_path: Path) -> None:
    with listened(tmp_path, loses=SETTLE) as (servers, listener):
        session = used_session(servers.a)
        assert code(servers.move(session)) == (503, "move_unsettled")
        assert servers.settled(session) == "a"
        offer = listener.heard(OFFER)
        head = re.match(rb"(?s).*?content-length: (\d+)\r\n.*?\r\n\r\n", offer)
        assert head is not None
        end = head.end() + int(head[1])
        connection, answer = say(servers, offer[:end])
        with connection:
            assert answer.status == 101
            connection.sendall(offer[end:])  # the session itself
            assert connection.recv(1) == b"", "b has received it all"
        connection, answer = say(servers, listener.heard(SETTLE))
        with connection:
            assert msgspec.msgpack.decode(answer.read(), type=Answer).taken is Taken.NO
        assert servers.owners(session) == ["a"]
        assert generate(servers.b, open_session(servers.b), [*PROMPT, 1])["usage"]["cached_tokens"] == 0


async def test_a_stranger_is_told_in_one_word_why_no_work_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    app = load_app(tiny_settings(api_keys=("k" * 32,)))
    async with app.router.lifespan_context(app):
        executor = app.state.services.sessions.executor
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            with monkeypatch.context() as patch:
                patch.setattr(executor, "failure", "it died in a way that is nobody's business")
                stranger = await http.get("/ready")
                known = await http.get("/ready", headers={"X-Api-Key": "k" * 32})
    assert code(stranger) == code(known) == (500, "engine_error")
    assert "business" in known.text
    assert "business" not in stranger.text
