"""Requests and streams without a network."""

from __future__ import annotations

from urllib.parse import unquote

import httpx
import pytest
from httpx_sse import ServerSentEvent
from hypothesis import given
from hypothesis import strategies as st

import client
from client import breakpoint_calls, calls
from client.edge import to_request
from client.stream import TurnDecoder

PAUSED = """{
    "status": "paused", "text": "a", "token_ids": [1], "finish_reason": null,
    "usage": {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 1, "tokens_recomputed": 0},
    "checkpoint": {
        "layer": 2, "first": 4, "end": 5, "shape": [1, 64], "hidden_size": 64, "dtype": "float32", "bytes": 256,
        "pass": "decode", "breakpoint": "bp_1", "saved_ms": 0.01, "created_at": 1.0, "age_s": 0.1, "expires_at": 601.0
    }
}"""
HTTP = httpx.Client(base_url="http://host/prefix")


@given(st.text(min_size=1, max_size=20) | st.sampled_from([".", "..", "..."]))
def test_an_id_stays_one_part_of_the_path(name: str) -> None:
    for request, parts in (
        (to_request(HTTP, calls.rewind_session(name, 3)), [name, "rewind"]),
        (to_request(HTTP, breakpoint_calls.remove_breakpoint(name, name)), [name, "breakpoints", name]),
    ):
        path = request.url.raw_path.decode()
        assert [unquote(part) for part in path.split("/")] == ["", "prefix", "v1", "sessions", *parts]


def test_only_what_is_given_is_sent() -> None:
    assert to_request(HTTP, calls.create_session(None, None, None)).read() == b"{}"
    params = to_request(HTTP, calls.list_sessions(None, None, None)).url.params
    assert not {"state", "tier", "after"} & set(params)
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


def test_a_turn_that_pauses_ends_its_stream() -> None:
    decoder = TurnDecoder("req_1")
    assert decoder.feed(ServerSentEvent("paused", PAUSED)) is None
    decoder.end()
    assert (decoder.turn.status, decoder.turn.finish_reason, decoder.turn.token_ids) == ("paused", None, (1,))
    assert decoder.turn.checkpoint is not None
    assert decoder.turn.checkpoint.in_pass == "decode"
    assert decoder.turn.checkpoint.shape == (1, 64)


def test_events_of_another_name_are_passed_over() -> None:
    decoder = TurnDecoder("req_1")
    assert decoder.feed(ServerSentEvent("message", "anything")) is None
