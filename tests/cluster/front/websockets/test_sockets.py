"""The WebSocket of responses through the front door."""

from __future__ import annotations

import httpx
import pytest
from openai import OpenAI
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from app.domain.session_ids import home_of_response
from tests.cluster.front.doors import AwayDirectory, Door, serving_door, wait_until

MODEL = "tiny-llama"


def _ask(openai: OpenAI, previous: str | None = None) -> str:
    """One response over a connection of its own. Returns its id."""
    with openai.responses.connect() as connection:
        connection.response.create(model=MODEL, input="hi", max_output_tokens=2, previous_response_id=previous)
        for event in connection:
            assert event.type != "error", event
            if event.type in ("response.completed", "response.incomplete"):
                return event.response.id
    raise AssertionError("no response")


def test_a_conversation_over_new_connections_stays_at_its_replica(door: Door) -> None:
    with OpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0) as openai:
        firsts = [_ask(openai) for _ in range(4)]
        assert {home_of_response(first) for first in firsts} == {"a", "b"}
        for first in firsts:  # the handshake cannot tell whose it is, the first message can
            assert home_of_response(_ask(openai, first)) == home_of_response(first)


def test_a_client_that_closes_ends_its_response(door: Door, client: httpx.Client) -> None:
    url = door.url.replace("http", "ws") + "/v1/responses"
    with connect(url) as connection:
        connection.send(f'{{"type": "response.create", "model": "{MODEL}", "input": "hi", "ignore_eos": true}}')
        assert "response.created" in str(connection.recv())
    wait_until(lambda: client.get("/v1/memory").json()["turns_running"] == 0)


@pytest.mark.parametrize("size", [3, 70_000])
def test_what_is_no_event_is_the_replicas_to_refuse(door: Door, size: int) -> None:
    with connect(door.url.replace("http", "ws") + "/v1/responses") as connection:
        connection.ping()
        connection.send([b"{", b'"x": "' + b"y" * size, b'"}'])  # in fragments
        assert '"error"' in str(connection.recv())


def test_a_message_without_end_is_refused(replica_urls: dict[str, str]) -> None:
    with (
        serving_door(replica_urls, max_request_bytes=10_000) as door,
        connect(door.url.replace("http", "ws") + "/v1/responses", compression=None) as connection,
    ):
        connection.send("x" * 20_000)
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


def test_a_handshake_that_is_refused_gets_the_answer(door: Door, replica_urls: dict[str, str]) -> None:
    with pytest.raises(InvalidStatus) as refused, connect(door.url.replace("http", "ws") + "/v1/responses?x=1"):
        pass
    assert refused.value.response.status_code == 400
    with serving_door(replica_urls, AwayDirectory()) as blind:
        url = blind.url.replace("http", "ws") + "/v1/responses"
        with pytest.raises(InvalidStatus) as away, connect(url, additional_headers={"X-Session-ID": "a name"}):
            pass
    assert away.value.response.status_code == 503
