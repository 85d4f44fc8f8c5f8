"""What servers without the key can do: nothing. What other servers, tenants and models change."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from app.cluster.moves.key import ClusterKey
from app.cluster.moves.signatures import DIGEST, SIGNATURE, sign_request
from app.cluster.moves.wire import COMMIT, OFFER, SETTLE, Answer, Question, encode
from app.domain.homes import Taken
from app.domain.values import SessionId
from tests.cluster.pair import KEY, PROMPT, Pair, code, generate, open_session, pair
from tests.tenants.tenant_files import tenant, write_tenants

BODY = encode(Question(SessionId("ses_b_1"), 1, 0))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("cluster")) as found:
        yield found


def ask(servers: Pair, headers: dict[str, str], path: str = SETTLE, body: bytes = BODY) -> httpx.Response:
    return servers.clients["b"].post(path, content=body, headers=headers)


def test_the_key_opens_the_door(servers: Pair) -> None:
    answer = ask(servers, sign_request(ClusterKey(KEY.encode()), "b", SETTLE, BODY))
    assert answer.status_code == 200
    assert msgspec.msgpack.decode(answer.content, type=Answer).taken is Taken.NO


def test_nothing_else_does(servers: Pair) -> None:
    key, other = ClusterKey(KEY.encode()), ClusterKey(b"another secret that is long enough too")
    good = sign_request(key, "b", SETTLE, BODY)
    changed = encode(Question(SessionId("ses_b_2"), 1, 0))
    forged = [
        ({}, SETTLE, BODY),
        (sign_request(other, "b", SETTLE, BODY), SETTLE, BODY),
        (sign_request(key, "a", SETTLE, BODY), SETTLE, BODY),
        (good, COMMIT, BODY),
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
    assert code(servers.clients["b"].get(SETTLE)) == (404, "not_found")
    assert code(ask(servers, good, "/v1/cluster/else")) == (404, "not_found")


def test_a_server_with_another_key_gets_no_session(tmp_path: Path) -> None:
    with pair(tmp_path, start=False) as servers:
        servers.start("a")
        (tmp_path / "key").write_text("another secret that is long enough to be one")
        servers.start("b")
        session = open_session(servers.clients["a"])
        generate(servers.clients["a"], session, PROMPT)
        assert code(servers.move(session)) == (502, "peer_stranger")
        assert servers.owners(session) == ["a"]
        assert generate(servers.clients["a"], session, [9])["status"] == "finished"


def test_a_peer_that_is_away_or_another_gets_none(tmp_path: Path) -> None:
    with pair(tmp_path, start=False, flags={"b": ("--model", "random:tiny-gpt2")}) as servers:
        a = servers.start("a")
        session = open_session(a)
        generate(a, session, PROMPT)
        away = servers.move(session)
        assert code(away) == (503, "peer_away")
        assert "Retry-After" in away.headers
        servers.start("b")
        assert code(servers.move(session)) == (409, "peer_mismatch")
        assert servers.owners(session) == ["a"]


def test_a_peer_without_room_refuses(tmp_path: Path) -> None:
    full = ("--kv-host", "0", "--kv-disk", "0")
    with pair(tmp_path, flags={"b": full}) as servers:
        session = open_session(servers.clients["a"])
        generate(servers.clients["a"], session, PROMPT)
        assert code(servers.move(session)) == (503, "peer_full")
        assert servers.owners(session) == ["a"]
        assert generate(servers.clients["a"], session, [9])["usage"]["cached_tokens"] == len(PROMPT) + 7


def test_without_a_cluster_nothing_moves(server_url: str) -> None:
    with httpx.Client(base_url=server_url) as http:
        session = open_session(http)
        assert code(http.post(f"/v1/sessions/{session}/move", json={"replica": "b"})) == (409, "no_cluster")


def test_only_an_operator_moves_a_session_and_its_tenant_finds_it(tmp_path: Path) -> None:
    with pair(tmp_path, start=False) as servers:
        everybody = [tenant("boss", role="operator"), tenant("ann"), tenant("bob")]
        tenants = write_tenants(tmp_path / "tenants.json", *everybody)
        less = write_tenants(tmp_path / "less.json", everybody[0], everybody[2])
        servers.headers = {"X-Api-Key": "ann"}
        a, b = servers.start("a", "--tenants", str(tenants)), servers.start("b", "--tenants", str(tenants))
        session = open_session(a)
        generate(a, session, PROMPT)
        boss = {"X-Api-Key": "boss"}

        def move(key: dict[str, str]) -> httpx.Response:
            return a.post(f"/v1/sessions/{session}/move", json={"replica": "b"}, headers=key)

        assert code(move({})) == (403, "wrong_role")
        assert code(move({"X-Api-Key": "bob"})) == (403, "wrong_role")
        assert move(boss).status_code == 200
        path = f"/v1/sessions/{session}"
        assert code(a.get(path)) == (421, "moved")
        assert code(a.get(path, headers=boss)) == (421, "moved")
        assert code(a.get(path, headers={"X-Api-Key": "bob"})) == (404, "not_found"), "it is no business of others"
        assert code(b.get(path, headers={"X-Api-Key": "bob"})) == (404, "not_found")
        assert generate(b, session, [9])["usage"]["cached_tokens"] == len(PROMPT) + 7
        servers.end("b")
        b = servers.start("b", "--tenants", str(less))
        session = open_session(a)
        assert code(move(boss)) == (409, "peer_mismatch")
        assert a.get(f"/v1/sessions/{session}").status_code == 200
