"""What becomes of a pause that is not simply resumed: timed out, cancelled, closed, forked, parked, left alone."""

from __future__ import annotations

import time
from unittest.mock import ANY

import httpx
import pytest
from httpx_sse import connect_sse

from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import (
    CONTEXT,
    HIDDEN,
    TURN,
    arm,
    generate,
    pause,
    read,
    resume,
    unbroken,
    without_age,
)
from tests.routers.generating import wait_until_idle


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
