"""How a paused turn goes on: resumed, timed out, in a copy on another server, and in a file that a client forged."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import (
    CONTEXT,
    HIDDEN,
    TURN,
    arm,
    generate,
    open_session,
    pause,
    read,
    resume,
    without_age,
)
from tests.routers.forging import IMPORT, imported, with_about
from tests.routers.generating import streaming

SCALE: dict[str, Any] = {"op": "scale", "factor": 2}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"until": {"layer": 1}}, "until.layer", "above 1, where the session is paused, and at most 3"),
        ({"until": "layer"}, "until", "'next_token' or 'end'"),
        ({"edits": [SCALE, {"op": "scale"}]}, "edits.1.factor", "scale needs it"),
        ({"edits": [{**SCALE, "positions": [0, 5]}]}, "edits.0.positions", "within 0:4"),
        ({"edits": [{"op": "add", "vector": [1]}]}, "edits.0.vector", f"must have {HIDDEN}"),
        ({"edits": [SCALE], "until": {"layer": 0}}, "until.layer", "above 1, where the session is paused"),
    ],
)
def test_a_bad_field_changes_nothing(
    http: httpx.Client, session: str, body: dict[str, Any], param: str, says: str
) -> None:
    checkpoint = pause(http, session)
    before = read(http, session).tolist()
    message = assert_error(http.post(f"{session}/resume", json=body), 422, "field_out_of_range", param=param)
    assert param in message
    assert says in message
    assert without_age(http.get(session).json()["checkpoint"]) == without_age(checkpoint)
    assert read(http, session).tolist() == before


def test_a_paused_session_takes_no_other_turn(http: httpx.Client, session: str) -> None:
    pause(http, session)
    for answer in (
        http.post(f"{session}/generate", json=TURN),
        http.post(f"{session}/rewind", json={"to_token": 0}),
    ):
        assert "is paused" in assert_error(answer, 409, "wrong_state")
    assert http.get(session).json()["state"] == "paused"


def test_the_prefill_of_a_turn_that_pauses_in_it_ends_with_its_pause(http: httpx.Client, session: str) -> None:
    began = time.perf_counter()
    pause(http, session)
    longest = (time.perf_counter() - began) * 1000
    time.sleep(0.05)
    resume(http, session)
    assert 0 < http.get(session).json()["usage"]["resume_ms"]["prefill"] <= longest


def test_a_pause_without_room_is_told_and_the_session_goes_on(serve_with: ServeWith) -> None:
    http = serve_with(max_activation_bytes=100)
    session = open_session(http)
    arm(http, session, when={"pass": "prefill"})
    answer = http.post(f"{session}/generate", json=TURN)
    assert "max_activation_bytes" in assert_error(answer, 429, "activations_full")
    assert answer.headers["retry-after"] == "1"
    found = http.get(session).json()
    assert (found["state"], found["tokens"]) == ("idle", 0)
    http.delete(f"{session}/breakpoints").raise_for_status()
    assert len(generate(http, session)["token_ids"]) == TURN["max_tokens"]


def exported(http: httpx.Client, session: str) -> tuple[bytes, dict[str, Any]]:
    """The file, and the label in it."""
    content = http.get(f"{session}/export").raise_for_status().content
    label: dict[str, Any] = json.loads(load(content)["about"].tobytes())
    return content, label


FORMS: list[dict[str, Any]] = [
    {"regex": "(ab|ba){30}"},
    {"json": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 30, "maxItems": 30}},
]
AGAIN: dict[str, Any] = {"temperature": 1, "seed": 11, "max_tokens": 400}


def paused(http: httpx.Client, form: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A session whose turn has paused after some tokens, and that turn."""
    session = open_session(http)
    arm(http, session, when={"position": CONTEXT + 8}, once=True)
    turn = generate(http, session, structured_outputs=form, **AGAIN)
    assert turn["status"] == "paused"
    return session, turn


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_a_paused_turn_keeps_its_grammar_wherever_it_is(
    http: httpx.Client, serve_with: ServeWith, form: dict[str, Any]
) -> None:
    whole = generate(http, open_session(http), structured_outputs=form, **AGAIN)
    assert whole["finish_reason"] == "stop"
    session, turn = paused(http, form)
    assert whole["text"].startswith(turn["text"])
    fork = f"/v1/sessions/{http.post(f'{session}/fork').raise_for_status().json()['id']}"
    content, label = exported(http, session)
    assert label["turn"]["fields"]["structured_outputs"]
    there = serve_with()
    for server, each in ((http, session), (http, fork), (there, imported(there, content))):
        found = resume(server, each)
        assert (found["text"], found["finish_reason"]) == (whole["text"], "stop")


def test_a_file_whose_turn_does_not_match_its_grammar_is_refused(http: httpx.Client) -> None:
    session, _ = paused(http, FORMS[0])
    content, label = exported(http, session)
    for form, says in (({"regex": "c+"}, "do not match"), ({"regex": "("}, "unclosed group")):
        label["turn"]["fields"]["structured_outputs"] = form
        message = assert_error(http.post(IMPORT, content=with_about(content, json.dumps(label))), 422, "bad_export")
        assert says in message


def test_a_checkpoint_in_a_wrong_place_does_not_end_the_turn_of_another(serve_with: ServeWith, tmp_path: Path) -> None:
    """It is put where its pass has not been. A context can have been computed in such parts, so it comes in."""
    http = serve_with(state_dir=tmp_path)  # only with a disk tier is the KV of a file taken over
    session = open_session(http)
    generate(http, session, token_ids=[5] * 20, max_tokens=4)
    arm(http, session, when={"pass": "prefill"})
    place = generate(http, session, token_ids=[6] * 20)["checkpoint"]
    assert (place["first"], place["end"]) == (23, 44)
    content, label = exported(http, session)
    label["turn"]["checkpoint"] |= {"first": 13, "end": 34}
    forged, bystander = imported(http, with_about(content, json.dumps(label))), open_session(http)
    with streaming(http, bystander, **{**TURN, "max_tokens": 200}) as events:
        next(events)
        http.delete(f"{forged}/breakpoints").raise_for_status()
        assert resume(http, forged)["status"] == "finished"
        *_, last = events
    assert (last.event, last.json()["finish_reason"], len(last.json()["token_ids"])) == ("finished", "length", 200)
