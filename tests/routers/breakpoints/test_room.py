"""Paused turns and captures where the memory for them is used up."""

from __future__ import annotations

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import arm, generate

TURN = {"token_ids": [5] * 40, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def test_a_pause_without_room_is_told_and_the_session_goes_on(serve_with: ServeWith) -> None:
    http = serve_with(max_activation_bytes=100)
    session = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
    arm(http, session, when={"pass": "prefill"})
    answer = http.post(f"{session}/generate", json=TURN)
    assert "max_activation_bytes" in assert_error(answer, 429, "activations_full")
    assert answer.headers["retry-after"] == "1"
    found = http.get(session).json()
    assert (found["state"], found["tokens"]) == ("idle", 0)
    http.delete(f"{session}/breakpoints").raise_for_status()
    assert len(generate(http, session, **TURN)["token_ids"]) == 4
