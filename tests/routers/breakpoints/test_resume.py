"""How a paused turn goes on: resumed, stepped, changed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from tests.errors import assert_error
from tests.routers.breakpoints.pausing import (
    CONTEXT,
    HIDDEN,
    LAYERS,
    TURN,
    arm,
    generate,
    pause,
    read,
    resume,
    unbroken,
    without_age,
)
from tests.routers.generating import streaming

SCALE: dict[str, Any] = {"op": "scale", "factor": 2}


def test_a_session_that_is_not_paused_cannot_be_resumed(http: httpx.Client, session: str) -> None:
    for body in ({}, {"until": "end"}, {"edits": [SCALE]}, {"stream": True}):
        answer = http.post(f"{session}/resume", json=body)
        assert "is idle, it must be paused" in assert_error(answer, 409, "wrong_state")
    with streaming(http, session, **{**TURN, "max_tokens": 900}) as stream:
        next(stream)
        assert "is running" in assert_error(http.post(f"{session}/resume"), 409, "wrong_state")


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_pause_changes_nothing(http: httpx.Client, session: str, layer: int) -> None:
    pause(http, session, layer=layer, when={"pass": "prefill"})
    turn = resume(http, session)
    assert (turn["status"], turn["finish_reason"], turn["checkpoint"]) == ("finished", "length", None)
    assert turn["token_ids"] == unbroken(http)
    assert turn["usage"]["completion_tokens"] == TURN["max_tokens"]
    found = http.get(session).json()
    assert (found["state"], found["tokens"], found["checkpoint"]) == ("idle", CONTEXT + TURN["max_tokens"], None)
    assert found["usage"]["prompt_tokens"] == CONTEXT


def test_a_turn_can_pause_at_every_token(http: httpx.Client, session: str) -> None:
    arm(http, session, when={"pass": "decode"})
    turns = [generate(http, session)]
    while turns[-1]["status"] == "paused":
        turns.append(resume(http, session))
    assert [turn["token_ids"] for turn in turns[:-1]] == [unbroken(http)[:count] for count in range(1, len(turns))]
    assert turns[-1]["token_ids"] == unbroken(http)
    assert [turn["checkpoint"]["first"] for turn in turns[:-1]] == list(range(CONTEXT, CONTEXT + len(turns) - 1))


def test_a_resumed_stream_says_what_a_whole_answer_says(http: httpx.Client, session: str) -> None:
    """Its `token` events are those since the pause; its last event is the whole turn."""
    whole = generate(http, session, logprobs=1)
    http.post(f"{session}/rewind", json={"to_token": 0}).raise_for_status()
    arm(http, session, when={"position": CONTEXT + 1})
    paused = generate(http, session, logprobs=1)
    assert paused["token_ids"] == whole["token_ids"][:2]
    assert paused["logprobs"] == whole["logprobs"][:2]
    with connect_sse(http, "POST", f"{session}/resume", json={"stream": True}) as source:
        *tokens, finished = list(source.iter_sse())
    assert [event.event for event in tokens] == ["token"] * len(tokens)
    assert [token for event in tokens for token in event.json()["token_ids"]] == whole["token_ids"][2:]
    assert finished.event == "finished"
    turn = finished.json()
    for same in ("text", "token_ids", "logprobs", "finish_reason"):
        assert turn[same] == whole[same]


def test_a_pause_can_be_stepped_to_a_higher_layer(http: httpx.Client, session: str) -> None:
    pause(http, session, layer=0)
    first = read(http, session)
    turn = resume(http, session, until={"layer": 2})
    assert (turn["status"], turn["checkpoint"]["layer"], turn["checkpoint"]["breakpoint"]) == ("paused", 2, None)
    assert (turn["checkpoint"]["first"], turn["checkpoint"]["end"]) == (0, CONTEXT)
    assert (read(http, session) != first).any()
    assert resume(http, session, until="end")["token_ids"] == unbroken(http)


def test_a_pause_can_be_stepped_from_token_to_token(http: httpx.Client, session: str) -> None:
    pause(http, session, layer=2, when={"pass": "prefill"})
    for position in (CONTEXT, CONTEXT + 1):
        checkpoint = resume(http, session, until="next_token")["checkpoint"]
        assert (checkpoint["layer"], checkpoint["first"], checkpoint["end"]) == (2, position, position + 1)
    assert resume(http, session)["token_ids"] == unbroken(http)


def test_until_the_end_passes_every_breakpoint(http: httpx.Client, session: str) -> None:
    pause(http, session)
    turn = resume(http, session, until="end")
    assert (turn["status"], turn["token_ids"]) == ("finished", unbroken(http))
    assert generate(http, session)["status"] == "paused"


def test_without_until_the_next_breakpoint_stops_the_turn(http: httpx.Client, session: str) -> None:
    later = arm(http, session, layer=3)
    pause(http, session, layer=1)
    assert resume(http, session)["checkpoint"]["breakpoint"] == later["id"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"until": {"layer": 1}}, "until.layer", "above 1, where the session is paused, and at most 3"),
        ({"until": {"layer": 4}}, "until.layer", "above 1, where the session is paused, and at most 3"),
        ({"until": {"layer": "2"}}, "until.layer", "integer"),
        ({"until": {}}, "until.layer", "required"),
        ({"until": {"layer": 2, "token": 1}}, "until.token", "unknown field"),
        ({"until": "layer"}, "until", "'next_token' or 'end'"),
        ({"until": 2}, "until", "an object"),
        ({"edits": []}, "edits", "a list of 1 to 16 items"),
        ({"edits": [SCALE, {"op": "scale"}]}, "edits.1.factor", "scale needs it"),
        ({"edits": [{**SCALE, "positions": [0, 5]}]}, "edits.0.positions", "within 0:4"),
        ({"edits": [{"op": "add", "vector": [1]}]}, "edits.0.vector", f"must have {HIDDEN}"),
        (
            {"edits": [SCALE], "until": {"layer": 0}},
            "until.layer",
            "above 1, where the session is paused, and at most 3",
        ),
        ({"stream": 1}, "stream", "true or false; got"),
        ({"token": 1}, "token", "unknown field"),
    ],
)
def test_a_bad_field_is_named_and_the_turn_stays_paused(
    http: httpx.Client, session: str, body: dict[str, Any], param: str, says: str
) -> None:
    checkpoint = pause(http, session)
    before = read(http, session).tolist()
    message = assert_error(http.post(f"{session}/resume", json=body), 422, "field_out_of_range", param=param)
    assert param in message
    assert says in message
    assert without_age(http.get(session).json()["checkpoint"]) == without_age(checkpoint)
    assert read(http, session).tolist() == before


def test_edits_are_made_before_the_turn_goes_on(http: httpx.Client, session: str) -> None:
    change = {"op": "add", "vector": [1] * HIDDEN, "factor": 50}
    pause(http, session, when={"pass": "prefill"})
    http.post(f"{session}/checkpoint/edit", json={"edits": [change]}).raise_for_status()
    expected = resume(http, session)["token_ids"]
    assert expected != unbroken(http)
    http.post(f"{session}/rewind", json={"to_token": 0}).raise_for_status()
    assert generate(http, session)["status"] == "paused"
    assert resume(http, session, edits=[change])["token_ids"] == expected
