"""Calls behind the front door find their sessions, by names and responses, wherever those have moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from app.cluster.table import Table
from tests.cluster.calling import MODEL, TEXTS, TOKENS, Chain, Chat, named, sdk, status
from tests.cluster.front.doors import Door, serving_door
from tests.cluster.pair import Pair, pair

Talk = Chat | Chain


@contextmanager
def behind(urls: dict[str, str], table: Table | None = None) -> Iterator[tuple[Door, OpenAI]]:
    with serving_door(urls, table) as door, sdk(door.url) as client:
        yield door, client


def home_of(servers: Pair, talk: Talk) -> str:
    (home,) = [name for name in servers.clients if talk.session in _sessions(servers, name)]
    return home


def _sessions(servers: Pair, name: str) -> list[str]:
    listed = servers.clients[name].get("/v1/sessions", params={"limit": 100}).raise_for_status().json()
    return [each["id"] for each in listed["data"]]


def ask(client: OpenAI, chain: Chain) -> Response:
    """One more response, over a connection of its own."""
    headers = {} if chain.name is None else {"X-Session-ID": chain.name}
    with client.responses.connect(extra_headers=headers) as connection:
        connection.response.create(
            model=MODEL, input="Two", max_output_tokens=TOKENS, previous_response_id=chain.ids[-1]
        )
        for event in connection:
            assert event.type != "error", event
            if event.type in ("response.completed", "response.incomplete"):
                return event.response
    raise AssertionError("no response")


def followed(door: Door) -> float:
    """How many turns were done at their second replica."""
    labels = {"turn": "yes", "way": "followed"}
    return door.server.front.registry.get_sample_value("djinn_front_requests_total", labels) or 0.0


@pytest.mark.parametrize("make", [lambda: Chat("mine"), Chain, lambda: Chain("ours")])
def test_each_turn_follows_its_session_once(tmp_path: Path, server_url: str, make: Callable[[], Talk]) -> None:
    with pair(tmp_path) as servers, behind(servers.urls) as (door, client), sdk(server_url) as alone:
        talk, stays = make(), make()
        for turn, text in enumerate(TEXTS):
            if turn in (2, 3):
                here = home_of(servers, talk)
                servers.moved(talk.session, here, "b" if here == "a" else "a")
            said, told = talk.say(client, text), stays.say(alone, text)
            assert said.text == told.text
            assert turn == 0 or said == told, "only a first turn may find the beginning of others"
            if turn == 2:
                assert followed(door) == 1
        if isinstance(talk, Chain):
            assert [client.responses.retrieve(each).id for each in talk.ids] == talk.ids
        httpx.delete(f"{server_url}/v1/sessions/{stays.session}").raise_for_status()


@pytest.mark.usefixtures("brief_farewells")
def test_a_front_door_finds_what_has_left_a_server_that_is_gone(tmp_path: Path) -> None:
    with pair(tmp_path / "pair") as servers:
        chat, chain, table = Chat("mine"), Chain(), Table(tmp_path / "table")
        with behind({"a": servers.urls["a"]}, table) as (_, client):
            chat.say(client, "One")
            chain.say(client, "One")
        table.close()
        servers.tell_to_end("a")
        log = servers.ended("a")
        assert "sessions have left: 2 to b" in log
        table = Table(tmp_path / "table")
        with behind(servers.urls, table) as (_, client):  # the server is still a target
            assert chat.say(client, "Two").cached > 0
            assert client.responses.retrieve(chain.ids[0]).id == chain.ids[0]
            assert chain.say(client, "Two").cached > 0
            with pytest.raises(openai.InternalServerError, match="replica a is away"):
                client.responses.retrieve("resp_a_" + "0" * 32)
        table.close()
        with behind({"b": servers.urls["b"]}) as (_, client):  # there are fewer now, and nothing else is known
            assert chat.say(client, "Three").cached > 0
            assert client.responses.retrieve(chain.ids[0]).id == chain.ids[0]


def test_a_name_of_a_server_that_is_no_target_any_more_begins_anew(tmp_path: Path) -> None:
    with pair(tmp_path / "pair") as servers:
        table = Table(tmp_path / "table")
        gone, stays = Chat("gone"), Chat("stays")
        with behind({"a": servers.urls["a"]}, table) as (_, client):
            for chat in (gone, stays):
                chat.say(client, "One")
            servers.moved(stays.session)
        servers.end("a")
        table.close()
        with behind({"b": servers.urls["b"]}, Table(tmp_path / "table")) as (_, client):
            before = {each.name: each.session for each in (gone, stays)}
            for chat in (gone, stays):
                chat.say(client, "Two")
            assert (gone.session == before["gone"], stays.session == before["stays"]) == (False, True)


def test_a_socket_follows_its_conversation(tmp_path: Path) -> None:
    with pair(tmp_path) as servers, behind(servers.urls) as (_, client):
        chain, named_chain = Chain(), Chain("mine")
        for each in (chain, named_chain):
            each.say(client, "One")
            here = home_of(servers, each)
            servers.moved(each.session, here, "b" if here == "a" else "a")
        for each in (chain, named_chain):
            response = ask(client, each)
            assert response.usage is not None
            assert response.usage.input_tokens_details.cached_tokens > 0
            home = servers.clients[home_of(servers, each)]
            assert status(home, response.id) == 200
        assert len(named(servers.clients[home_of(servers, named_chain)], "mine")) == 1
