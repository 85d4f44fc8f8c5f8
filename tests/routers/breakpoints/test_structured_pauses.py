"""Turns under a grammar that pause: they go on in it, here, in a fork, and in another server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import CONTEXT, arm, generate, resume
from tests.routers.breakpoints.test_paused_exports import IMPORT, exported
from tests.routers.forging import with_about

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


def test_a_rewound_session_takes_another_grammar(http: httpx.Client) -> None:
    session = open_session(http)
    first = generate(http, session, structured_outputs=FORMS[0], **AGAIN)
    http.post(f"{session}/rewind", json={"to_token": CONTEXT}).raise_for_status()
    again = generate(http, session, **{**AGAIN, "token_ids": []}, structured_outputs=FORMS[0])
    assert again["text"] == first["text"]
    http.post(f"{session}/rewind", json={"to_token": CONTEXT}).raise_for_status()
    other = generate(http, session, **{**AGAIN, "token_ids": []}, structured_outputs={"regex": "z{5}"})
    assert other["text"] == "zzzzz"
