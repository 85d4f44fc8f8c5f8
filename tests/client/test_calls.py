"""Requests and streams without a network."""

from __future__ import annotations

from urllib.parse import unquote

import httpx
import pytest
from httpx_sse import ServerSentEvent
from hypothesis import given
from hypothesis import strategies as st

import client
from client import calls
from client.edge import to_request
from client.stream import TurnDecoder

HTTP = httpx.Client(base_url="http://host/prefix")


@given(st.text(min_size=1, max_size=20).filter(lambda text: text.strip(".")))
def test_an_id_stays_one_part_of_the_path(session: str) -> None:
    request = to_request(HTTP, calls.rewind_session(session, 3))
    path = request.url.raw_path.decode()
    assert path.count("/") == 5
    assert unquote(path.split("/")[4]) == session


def test_only_what_is_given_is_sent() -> None:
    assert to_request(HTTP, calls.create_session(None, None, None)).read() == b"{}"
    params = to_request(HTTP, calls.list_sessions(None, None, "")).url.params
    assert not {"state", "tier"} & set(params)
    assert to_request(HTTP, calls.set_phase("ses_1", "ready", None)).read() == b'{"phase":"ready"}'
    body = to_request(HTTP, calls.generate("ses_1", {"prompt": "x"}, stream=True)).read()
    assert body == b'{"prompt":"x","stream":true}'


def test_the_turn_is_there_only_when_it_is_over() -> None:
    decoder = TurnDecoder("req_1")
    tokens = decoder.feed(ServerSentEvent("token", '{"text": "a", "token_ids": [1, 2]}'))
    assert tokens == client.TokenEvent(text="a", token_ids=(1, 2))
    with pytest.raises(RuntimeError, match="not over"):
        _ = decoder.turn
    with pytest.raises(client.StreamBroken):
        decoder.end()


def test_events_of_another_name_are_passed_over() -> None:
    decoder = TurnDecoder("req_1")
    assert decoder.feed(ServerSentEvent("message", "anything")) is None
