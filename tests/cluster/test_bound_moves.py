"""Sessions that calls are bound to move with their names and responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.cluster.calling import MODEL, TEXTS, Chain, Chat, Said, named, sdk, status
from tests.cluster.pair import Pair, code, pair
from tests.tenants.tenant_files import tenant, write_tenants

Talk = Chat | Chain
KINDS: dict[str, Callable[[str], Talk]] = {
    "chat": Chat,
    "responses": lambda name: Chain(),
    "named responses": Chain,
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on_as_on_a_single_server(servers: Pair, server_url: str, kind: str) -> None:
    talk, home, said = KINDS[kind](kind), "a", list[Said]()
    with sdk(servers.urls["a"]) as a, sdk(servers.urls["b"]) as b:
        for there, text in zip("aabba", TEXTS, strict=True):
            if there != home:
                servers.moved(talk.session, home, there)
            home = there
            said.append(talk.say(a if home == "a" else b, f"{kind} {text}"))
    with sdk(server_url) as alone:
        stays = KINDS[kind](f"{kind} that stays")
        told = [stays.say(alone, f"{kind} {text}") for text in TEXTS]
    assert (said[0].text, said[1:]) == (told[0].text, told[1:]), "only a first turn may find the beginning of others"
    assert all(each.cached > 0 for each in said[1:])
    session = servers.clients["a"].get(f"/v1/sessions/{talk.session}").json()
    assert session["usage"]["tokens_recomputed"] == 0


def test_the_old_home_names_the_new_one(servers: Pair) -> None:
    a, b, home = servers.clients["a"], servers.clients["b"], f"b {servers.urls['b']}"
    chat, chain = Chat("follow me"), Chain()
    with sdk(servers.urls["a"]) as client:
        for talk in (chat, chain):
            talk.say(client, "One")
            talk.say(client, "Two")
            servers.moved(talk.session)
        for talk in (chat, chain):
            with pytest.raises(openai.APIStatusError) as refused:
                talk.say(client, "Three")
            assert (refused.value.status_code, refused.value.code) == (421, "moved")
            assert refused.value.response.headers["Djinn-Home"] == home
    for response in chain.ids:
        path = f"/v1/responses/{response}"
        asked = (a.get(path), a.get(f"{path}/input_items"), a.delete(path), a.post(f"{path}/cancel"))
        for answer in asked:
            assert (code(answer), answer.headers["Djinn-Home"]) == ((421, "moved"), home)
        assert b.get(path).json()["id"] == response
    message = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    said = a.post("/v1/messages", json=message, headers={"X-Session-ID": chat.name})
    assert (said.status_code, said.headers["Djinn-Home"]) == (421, home)
    assert b.post("/v1/messages", json=message, headers={"X-Session-ID": chat.name}).status_code == 200
    socket = servers.urls["a"].replace("http", "ws") + "/v1/responses"
    with pytest.raises(InvalidStatus) as denied:
        connect(socket, additional_headers={"X-Session-ID": chat.name})
    assert denied.value.response.status_code == 421
    assert (named(a, chat.name), named(b, chat.name)) == ([], [chat.session])


def test_no_other_tenant_learns_of_it(tmp_path: Path) -> None:
    with pair(tmp_path, start=False) as servers:
        everybody = [tenant("boss", role="operator"), tenant("ann"), tenant("bob")]
        flags = ("--tenants", str(write_tenants(tmp_path / "tenants.json", *everybody)))
        servers.headers = {"X-Api-Key": "ann"}
        a, _ = servers.start("a", *flags), servers.start("b", *flags)
        chain, bobs = Chain("shared"), Chain("shared")
        with sdk(servers.urls["a"], api_key="ann") as ann, sdk(servers.urls["a"], api_key="bob") as bob:
            chain.say(ann, "One")
            moved = a.post(f"/v1/sessions/{chain.session}/move", json={"replica": "b"}, headers={"X-Api-Key": "boss"})
            assert moved.status_code == 200, moved.text
            bobs.say(bob, "One")
        assert bobs.session != chain.session
        other = a.get(f"/v1/responses/{chain.ids[0]}", headers={"X-Api-Key": "bob"})
        assert code(other) == (404, "not_found")
        assert code(a.get(f"/v1/responses/{chain.ids[0]}")) == (421, "moved")
        # The same name of another tenant is another name.
        boss = {"X-Api-Key": "boss"}
        assert a.post(f"/v1/sessions/{bobs.session}/move", json={"replica": "b"}, headers=boss).status_code == 200


@pytest.mark.parametrize("flags", [("--max-responses", "4"), ("--max-responses-bytes", "4KiB")])
def test_a_full_target_takes_nothing_and_loses_nothing(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with pair(tmp_path, flags={"b": flags}) as servers:
        goes, there = Chain(), [Chain(), Chain()]
        with sdk(servers.urls["a"]) as a, sdk(servers.urls["b"]) as b:
            for text in TEXTS[:3]:
                goes.say(a, text)
            for chain in there:
                chain.say(b, "One")
            refused = servers.move(goes.session)
            assert code(refused) == (503, "peer_full")
            assert "Retry-After" in refused.headers
            assert [status(servers.clients["b"], chain.ids[0]) for chain in there] == [200, 200]
            assert [status(servers.clients["a"], each) for each in goes.ids] == [200] * 3
            assert goes.say(a, "Four").cached > 0


def test_a_name_that_is_taken_keeps_the_session_at_home(servers: Pair) -> None:
    here, there = Chat("taken"), Chat("taken")
    with sdk(servers.urls["a"]) as a, sdk(servers.urls["b"]) as b:
        here.say(a, "One")
        there.say(b, "One")
        assert code(servers.move(here.session)) == (409, "name_taken")
        assert code(servers.move(there.session, "b", "a")) == (409, "name_taken")
        assert here.say(a, "Two").cached > 0
        assert there.say(b, "Two").cached > 0
        servers.clients["b"].delete(f"/v1/sessions/{there.session}").raise_for_status()
        servers.moved(here.session)
        assert here.say(b, "Three").cached > 0


def test_a_branch_moves_with_its_own_session(servers: Pair) -> None:
    trunk = Chain()
    with sdk(servers.urls["a"]) as a, sdk(servers.urls["b"]) as b:
        trunk.say(a, "One")
        trunk.say(a, "Two")
        branch = Chain(ids=trunk.ids[:1])
        branch.say(a, "Other")
        assert branch.session != trunk.session
        servers.moved(branch.session)
        assert [status(servers.clients["a"], each) for each in (*trunk.ids, branch.ids[-1])] == [200, 200, 421]
        assert branch.say(b, "More").cached > 0
        assert trunk.say(a, "Three").cached > 0


def test_a_response_that_was_deleted_stays_deleted(servers: Pair) -> None:
    chain, b = Chain(), servers.clients["b"]
    with sdk(servers.urls["a"]) as a, sdk(servers.urls["b"]) as there:
        chain.say(a, "One")
        chain.say(a, "Two")
        servers.clients["a"].delete(f"/v1/responses/{chain.ids[0]}").raise_for_status()
        servers.moved(chain.session)
        assert [status(b, each) for each in chain.ids] == [404, 200]
        assert chain.say(there, "Three").cached > 0


def test_a_session_that_waits_for_a_tool_waits_there_too(servers: Pair) -> None:
    chat = Chat("waits")
    with sdk(servers.urls["a"]) as client:
        chat.say(client, "One")
        path = f"/v1/sessions/{chat.session}"
        servers.clients["a"].post(f"{path}/phase", json={"phase": "io_wait"}).raise_for_status()
        servers.moved(chat.session)
        assert servers.clients["b"].get(path).json()["phase"] == "io_wait"
    with sdk(servers.urls["b"]) as there:
        assert chat.say(there, "Two").cached > 0


def test_the_list_finds_a_session_by_its_name(servers: Pair) -> None:
    a, name = servers.clients["a"], "a name: ä/%&?"
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    headers = [(b"X-Session-ID", name.encode("latin-1"))]
    answer = a.post("/v1/completions", json=body, headers=headers).raise_for_status()
    assert named(a, name) == [answer.headers["X-Session-ID"]]
    assert named(a, "nobody") == []
