"""Sessions that calls are bound to move with their names and responses, and calls to any server find them."""

from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.cluster.pair import MODEL, TEXTS, TOKENS, Chain, Chat, Pair, alone, behind, code, named, pair, sdk, status
from tests.durability.restarting import open_session
from tests.processes import metric
from tests.waiting import wait_until

Talk = Chat | Chain


def test_the_old_home_names_the_new_one(servers: Pair) -> None:
    a, b, home = servers.a, servers.b, f"b {servers.urls['b']}"
    chat, chain = Chat("follow me"), Chain()
    with servers.sdk("a") as client:
        for talk in (chat, chain):
            talk.say(client, "One")
            talk.say(client, "Two")
            servers.moved(talk.session)
        for talk in (chat, chain):
            with pytest.raises(openai.APIStatusError) as refused:
                talk.say(client, "Three")
            assert (refused.value.status_code, refused.value.code) == (421, "moved")
            assert refused.value.response.headers["Djinn-Home"] == home
    path, turn = f"/v1/sessions/{chat.session}", {"token_ids": [1], "max_tokens": 1}
    asked = [a.get(path), a.post(f"{path}/generate", json=turn), a.delete(path), servers.move(chat.session)]
    for response in chain.ids:
        path = f"/v1/responses/{response}"
        asked += [a.get(path), a.get(f"{path}/input_items"), a.delete(path), a.post(f"{path}/cancel")]
        assert b.get(path).json()["id"] == response
    for answer in asked:
        assert (code(answer), answer.headers["Djinn-Home"]) == ((421, "moved"), home)
    message = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    said = a.post("/v1/messages", json=message, headers={"X-Session-ID": chat.name})
    assert (said.status_code, said.headers["Djinn-Home"]) == (421, home)
    assert b.post("/v1/messages", json=message, headers={"X-Session-ID": chat.name}).status_code == 200
    socket = servers.urls["a"].replace("http", "ws") + "/v1/responses"
    with pytest.raises(InvalidStatus) as denied:
        connect(socket, additional_headers={"X-Session-ID": chat.name, **alone("a")})
    assert denied.value.response.status_code == 421
    assert (named(a, chat.name), named(b, chat.name)) == ([], [chat.session])


@pytest.mark.parametrize("full", ["--max-sessions=2", "--max-responses=4", "--max-responses-bytes=4KiB"])
def test_a_full_target_takes_nothing_and_loses_nothing(tmp_path: Path, full: str) -> None:
    with pair(tmp_path, flags={"b": (full,)}) as servers:
        goes, there = Chain(), [Chain(), Chain()]
        with servers.sdk("a") as a, servers.sdk("b") as b:
            for text in TEXTS[:3]:
                goes.say(a, text)
            for chain in there:
                chain.say(b, "One")
            refused = servers.move(goes.session)
            assert code(refused) == (503, "peer_full")
            assert "Retry-After" in refused.headers
            assert [status(servers.b, chain.ids[0]) for chain in there] == [200, 200]
            assert [status(servers.a, each) for each in goes.ids] == [200] * 3
            assert goes.say(a, "Four").cached > 0


def test_a_name_that_is_taken_keeps_the_session_at_home(servers: Pair) -> None:
    here, there = Chat("taken"), Chat("taken")
    with servers.sdk("a") as a, servers.sdk("b") as b:
        here.say(a, "One")
        there.say(b, "One")
        assert code(servers.move(here.session)) == (409, "name_taken")
        assert here.say(a, "Two").cached > 0
        assert there.say(b, "Two").cached > 0
        servers.b.delete(f"/v1/sessions/{there.session}").raise_for_status()
        servers.moved(here.session)
        assert here.say(b, "Three").cached > 0


def test_a_branch_moves_with_its_own_session(servers: Pair) -> None:
    trunk = Chain()
    with servers.sdk("a") as a, servers.sdk("b") as b:
        trunk.say(a, "One")
        trunk.say(a, "Two")
        branch = Chain(ids=trunk.ids[:1])
        branch.say(a, "Other")
        assert branch.session != trunk.session
        servers.moved(branch.session)
        assert [status(servers.a, each) for each in (*trunk.ids, branch.ids[-1])] == [200, 200, 421]
        assert branch.say(b, "More").cached > 0
        assert trunk.say(a, "Three").cached > 0


def test_the_list_finds_a_session_by_its_name(servers: Pair) -> None:
    a, body = servers.a, {"model": MODEL, "prompt": "x", "max_tokens": 1}
    for name, encoding in (("a name: ä/%&?", "latin-1"), ("é", "utf-8"), ("я" * 256, "utf-8")):
        headers = [(b"X-Session-ID", name.encode(encoding))]
        session = a.post("/v1/completions", json=body, headers=headers).raise_for_status().headers["X-Session-ID"]
        assert named(a, name) == [session]
        assert a.get(f"/v1/sessions/{session}").json()["metadata"] == {"name": name}
    assert named(a, "nobody") == []


# Through any server.


def home_of(servers: Pair, talk: Talk) -> str:
    (home,) = servers.owners(talk.session)
    return home


def ask(client: OpenAI, chain: Chain) -> Response:
    headers = {} if chain.name is None else {"X-Session-ID": chain.name}
    with client.responses.connect(extra_headers=headers) as connection:
        connection.response.create(model=MODEL, input="2", max_output_tokens=TOKENS, previous_response_id=chain.ids[-1])
        for event in connection:
            assert event.type != "error", event
            if event.type in ("response.completed", "response.incomplete"):
                return event.response
    raise AssertionError("no response")


def followed(servers: Pair) -> float:
    """How many turns were done at their second replica."""
    way = 'djinn_cluster_requests_total{turn="yes",way="followed"}'
    return sum(metric(http, way) for http in servers.clients.values())


@pytest.mark.parametrize(("make", "at"), [(lambda: Chat("mine"), "a"), (Chain, "b"), (lambda: Chain("ours"), "a")])
def test_each_turn_follows_its_session(tmp_path: Path, server_url: str, make: Callable[[], Talk], at: str) -> None:
    with pair(tmp_path) as servers, sdk(servers.urls[at]) as client, sdk(server_url) as alone:
        talk, stays = make(), make()
        for turn, text in enumerate((f"{tmp_path.name[-9:]} {TEXTS[0]}", *TEXTS[1:])):  # the others' is not found
            if turn in (2, 3):
                here = home_of(servers, talk)
                servers.moved(talk.session, here, "b" if here == "a" else "a")
            said, told = talk.say(client, text), stays.say(alone, text)
            assert said.text == told.text
            assert turn == 0 or said == told, "only a first turn may find the beginning of others"
        assert followed(servers) <= 2, "once for each move"
        if isinstance(talk, Chain):
            assert [client.responses.retrieve(each).id for each in talk.ids] == talk.ids
        httpx.delete(f"{server_url}/v1/sessions/{stays.session}").raise_for_status()


@pytest.mark.usefixtures("brief_farewells")
def test_what_has_left_a_server_that_is_gone_is_found(tmp_path: Path) -> None:
    with pair(tmp_path) as servers:
        chat, chain = Chat("mine"), Chain()
        with servers.sdk("a") as client:
            chat.say(client, "One")
            chain.say(client, "One")
        path = f"/v1/sessions/{open_session(servers.a)}"
        servers.tell_to_end("a")
        assert "sessions have left: 3 to b" in servers.ended("a")
        with behind(servers) as http, sdk(servers.urls["b"]) as client:
            assert http.get(path).status_code == 200
            assert chat.say(client, "Two").cached > 0
            assert client.responses.retrieve(chain.ids[0]).id == chain.ids[0]
            assert chain.say(client, "Two").cached > 0
            for lost in ("/v1/responses/resp_a_" + "0" * 32, "/v1/sessions/ses_a_" + "4" * 36):
                wait_until(lambda lost=lost: code(http.get(lost)) == (404, "not_found"))  # type: ignore[misc]
        assert servers.start("a").get(path).status_code == 421


def test_a_socket_follows_its_conversation(tmp_path: Path) -> None:
    with pair(tmp_path) as servers, sdk(servers.urls["b"]) as client:
        for chain in (Chain(), Chain("by socket"), Chain(), Chain("again")):
            chain.say(client, "One")
            here = home_of(servers, chain)
            servers.moved(chain.session, here, "b" if here == "a" else "a")
            response = ask(client, chain)
            assert response.usage is not None
            assert response.usage.input_tokens_details.cached_tokens > 0
            home = servers.clients[home_of(servers, chain)]
            assert status(home, response.id) == 200
            assert chain.name is None or len(named(home, chain.name)) == 1
