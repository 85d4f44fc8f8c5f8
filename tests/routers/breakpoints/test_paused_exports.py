"""Files of paused sessions as a bad client could change them: nobody else's turn suffers from what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import arm, generate, pause, resume
from tests.routers.forging import with_about
from tests.routers.generating import streaming

IMPORT = "/v1/sessions/import"
LONG = {"token_ids": [9, 8, 7], "temperature": 0, "ignore_eos": True}


def exported(http: httpx.Client, session: str) -> tuple[bytes, dict[str, Any]]:
    """The file, and the label in it."""
    content = http.get(f"{session}/export").raise_for_status().content
    label: dict[str, Any] = json.loads(load(content)["about"].tobytes())
    return content, label


def lower(label: dict[str, Any], by: int = 10) -> None:
    """Put the checkpoint where the pass has not been."""
    place = label["turn"]["checkpoint"]
    place["first"] -= by
    place["end"] -= by


def score(label: dict[str, Any], alternative: object) -> None:
    """Give the turn a scored token with this alternative."""
    label["turn"]["logprobs"] = [{"token_id": 1, "logprob": -1.0, "top": [alternative]}]


def pause_in_context(http: httpx.Client, session: str) -> None:
    """Over positions 23 to 43, after a turn that has computed those before."""
    generate(http, session, token_ids=[5] * 20, max_tokens=4)
    arm(http, session, when={"pass": "prefill"})
    checkpoint = generate(http, session, token_ids=[6] * 20)["checkpoint"]
    assert (checkpoint["first"], checkpoint["end"]) == (23, 44)


def pause_at_token(http: httpx.Client, session: str) -> None:
    """At position 41, the second generated token's."""
    arm(http, session, when={"position": 41})
    assert generate(http, session, token_ids=[5] * 40)["checkpoint"]["first"] == 41


@pytest.mark.parametrize("begin", [pause_in_context, pause_at_token])
def test_a_checkpoint_in_a_wrong_place_does_not_end_another_sessions_turn(
    serve_with: ServeWith, tmp_path: Path, begin: Callable[[httpx.Client, str], None]
) -> None:
    http = serve_with(state_dir=tmp_path)  # only with a disk tier is the KV of a file taken over
    session = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
    begin(http, session)
    content, label = exported(http, session)
    lower(label)
    answer = http.post(IMPORT, content=with_about(content, json.dumps(label)))
    if begin is pause_at_token:
        assert "a decode pass over 31:32 of 42 tokens" in assert_error(answer, 422, "bad_export")
        return
    assert answer.status_code == 201  # a context can have been computed in such parts
    forged = f"/v1/sessions/{answer.json()['id']}"
    bystander = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
    with streaming(http, bystander, **LONG, max_tokens=200) as events:
        next(events)
        http.delete(f"{forged}/breakpoints").raise_for_status()
        assert resume(http, forged)["status"] == "finished"
        *_, last = events
    assert (last.event, last.json()["finish_reason"]) == ("finished", "length")
    assert len(last.json()["token_ids"]) == 200


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda label: lower(label, by=1), "a prefill pass over -1:3"),
        (lambda label: label["turn"]["checkpoint"].update({"pass": "decode"}), "turn.checkpoint.pass: unknown field"),
        (lambda label: score(label, ["x", 0.0]), "turn.logprobs.0.top.0.0: an integer from 0 to 2147483647; got 'x'"),
        (lambda label: label["turn"]["hidden"].update({"data": "x"}), "turn.hidden.data: a string in base64; got 'x'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    http: httpx.Client, session: str, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    pause(http, session)
    content, label = exported(http, session)
    change(label)
    before = http.get("/v1/memory").json()["sessions"]
    message = assert_error(http.post(IMPORT, content=with_about(content, json.dumps(label))), 422, "bad_export")
    assert says in message
    assert http.get("/v1/memory").json()["sessions"] == before
