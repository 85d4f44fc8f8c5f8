"""How a paused turn goes on: resumed, stepped, changed, timed out, cancelled, forked."""

from __future__ import annotations

import json
import time
from typing import Any
from unittest.mock import ANY

import httpx
import pytest
from httpx_sse import connect_sse

from tests.conftest import ServeWith
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
from tests.routers.breakpoints.test_paused_exports import IMPORT, exported
from tests.routers.forging import with_about
from tests.routers.generating import streaming, wait_until_idle

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


def state(http: httpx.Client, session: str) -> str:
    found: str = http.get(session).json()["state"]
    return found


def test_a_paused_session_takes_no_other_turn(http: httpx.Client, session: str) -> None:
    pause(http, session)
    for answer in (
        http.post(f"{session}/generate", json=TURN),
        http.post(f"{session}/rewind", json={"to_token": 0}),
    ):
        assert "is paused" in assert_error(answer, 409, "wrong_state")
    assert state(http, session) == "paused"


def test_the_prefill_of_a_turn_that_pauses_in_it_ends_with_its_pause(http: httpx.Client, session: str) -> None:
    began = time.perf_counter()
    pause(http, session)
    longest = (time.perf_counter() - began) * 1000
    time.sleep(0.05)
    resume(http, session)
    assert 0 < http.get(session).json()["usage"]["resume_ms"]["prefill"] <= longest


def test_a_pause_that_times_out_can_end_the_turn(http: httpx.Client, session: str) -> None:
    arm(http, session, when={"position": CONTEXT + 1}, timeout_s=0.2, on_timeout="abort")
    generated = generate(http, session)["token_ids"]
    assert len(generated) == 2
    assert wait_until_idle(http, session)["tokens"] == CONTEXT + 2
    assert http.get(f"{session}/history").json()["token_ids"][CONTEXT:] == generated
    assert http.post(f"{session}/generate", json={**TURN, "token_ids": []}).status_code == 200


def test_a_paused_turn_can_be_cancelled(http: httpx.Client, session: str) -> None:
    arm(http, session, when={"position": CONTEXT + 1})
    generate(http, session)
    cancelled = http.post(f"{session}/cancel").json()
    assert (cancelled["state"], cancelled["checkpoint"], cancelled["tokens"]) == ("idle", None, CONTEXT + 2)
    assert_error(http.post(f"{session}/resume"), 409, "wrong_state")


def test_forks_of_a_paused_session_end_each_in_their_own_way(http: httpx.Client, session: str) -> None:
    expected = unbroken(http)
    arm(http, session, when={"position": CONTEXT + 1})
    paused = generate(http, session)
    fork = http.post(f"{session}/fork").json()
    assert fork["state"] == "paused"
    assert without_age(fork["checkpoint"]) == without_age(paused["checkpoint"]) | {"expires_at": ANY}
    path = f"/v1/sessions/{fork['id']}"
    assert http.get(f"{path}/breakpoints").json() == http.get(f"{session}/breakpoints").json()
    assert (read(http, path) == read(http, session)).all()
    changed = resume(http, path, until="end", edits=[{"op": "add", "vector": [1] * HIDDEN, "factor": 50}])
    assert changed["token_ids"][:2] == expected[:2]
    assert changed["token_ids"] != expected
    assert resume(http, session, until="end")["token_ids"] == expected
    http.delete(path)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_a_resumed_turn_cancels_it(http: httpx.Client, session: str, stream: bool) -> None:
    arm(http, session, when={"pass": "prefill"})
    assert generate(http, session, max_tokens=1000)["status"] == "paused"
    if stream:
        with connect_sse(http, "POST", f"{session}/resume", json={"stream": True}) as source:
            assert next(source.iter_sse()).event == "token"
    else:
        with pytest.raises(httpx.ReadTimeout):
            http.post(f"{session}/resume", timeout=0.05)
    assert wait_until_idle(http, session)["tokens"] < CONTEXT + 1000


def test_a_pause_without_room_is_told_and_the_session_goes_on(serve_with: ServeWith) -> None:
    http = serve_with(max_activation_bytes=100)
    session = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
    arm(http, session, when={"pass": "prefill"})
    answer = http.post(f"{session}/generate", json=TURN)
    assert "max_activation_bytes" in assert_error(answer, 429, "activations_full")
    assert answer.headers["retry-after"] == "1"
    assert (state(http, session), http.get(session).json()["tokens"]) == ("idle", 0)
    http.delete(f"{session}/breakpoints").raise_for_status()
    assert len(generate(http, session)["token_ids"]) == TURN["max_tokens"]


FORMS: list[dict[str, Any]] = [
    {"regex": "(ab|ba){30}"},
    {"choice": ["x" * 60, "y" * 60]},
    {"grammar": 'start: ("ab" | "ba")~30'},
    {"json": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 30, "maxItems": 30}},
]
AGAIN: dict[str, Any] = {"temperature": 1, "seed": 11, "max_tokens": 400}
SESSIONS = "/v1/sessions"


def open_session(http: httpx.Client) -> str:
    return f"{SESSIONS}/{http.post(SESSIONS).json()['id']}"


def paused(http: httpx.Client, form: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A session whose turn has paused after some tokens, and that turn."""
    session = open_session(http)
    arm(http, session, when={"position": CONTEXT + 8}, once=True)
    turn = generate(http, session, structured_outputs=form, **AGAIN)
    assert turn["status"] == "paused"
    return session, turn


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_a_paused_turn_goes_on_in_its_grammar_wherever_it_goes(
    http: httpx.Client, serve_with: ServeWith, form: dict[str, Any]
) -> None:
    whole = generate(http, open_session(http), structured_outputs=form, **AGAIN)
    assert whole["finish_reason"] == "stop"
    session, turn = paused(http, form)
    assert whole["text"].startswith(turn["text"])
    fork = f"{SESSIONS}/{http.post(f'{session}/fork').raise_for_status().json()['id']}"
    content, label = exported(http, session)
    assert label["turn"]["fields"]["structured_outputs"]
    there = serve_with()
    imported = f"{SESSIONS}/{there.post(IMPORT, content=content).raise_for_status().json()['id']}"
    for server, each in ((http, session), (http, fork), (there, imported)):
        found = resume(server, each)
        assert (found["text"], found["finish_reason"]) == (whole["text"], "stop")


def test_a_file_whose_turn_does_not_match_its_grammar_is_refused(http: httpx.Client) -> None:
    session, _ = paused(http, FORMS[0])
    content, label = exported(http, session)
    for form, says in (({"regex": "c+"}, "do not match"), ({"regex": "("}, "unclosed group")):
        label["turn"]["fields"]["structured_outputs"] = form
        message = assert_error(http.post(IMPORT, content=with_about(content, json.dumps(label))), 422, "bad_export")
        assert says in message
