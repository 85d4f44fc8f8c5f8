"""Log-probabilities where the memory for them is used up."""

from __future__ import annotations

import httpx

from app.sessions.charges.logprob_room import BYTES_EACH
from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import arm, generate, resume

PROMPT, GENERATED, ALTERNATIVES = 40, 4, 1
OF_A_CALL = (PROMPT + GENERATED) * (ALTERNATIVES + 1)
"""Log-probabilities of an echoed prompt and its continuation."""


def complete(http: httpx.Client, *, prompts: int = 1, stream: bool = False) -> httpx.Response:
    model = http.get("/v1/models").json()["data"][0]["id"]
    body = {
        "model": model,
        "prompt": [[5] * PROMPT] * prompts,
        "max_tokens": GENERATED,
        "echo": True,
        "logprobs": ALTERNATIVES,
        "stream": stream,
    }
    return http.post("/v1/completions", json=body)


def test_calls_of_all_its_size_are_answered_one_after_the_other(serve_with: ServeWith) -> None:
    http = serve_with(max_logprobs_bytes=2 * OF_A_CALL * BYTES_EACH)
    for _ in range(3):
        for stream in (False, True):
            complete(http, prompts=2, stream=stream).raise_for_status()


def test_a_call_that_never_fits_names_its_field(serve_with: ServeWith) -> None:
    http = serve_with(max_logprobs_bytes=2 * OF_A_CALL * BYTES_EACH)
    assert_error(complete(http, prompts=3), 400, "field_out_of_range", param="logprobs")


def test_a_paused_turn_holds_what_it_may_yet_report(serve_with: ServeWith) -> None:
    http = serve_with(max_logprobs_bytes=OF_A_CALL * BYTES_EACH)
    session = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
    arm(http, session, when={"pass": "prefill"})
    turn = {"token_ids": [5] * PROMPT, "max_tokens": GENERATED, "logprobs": 0, "ignore_eos": True}
    assert generate(http, session, **turn)["status"] == "paused"
    refused = complete(http)
    assert "max_logprobs_bytes" in assert_error(refused, 429, "logprobs_full")
    assert refused.headers["retry-after"] == "1"
    assert resume(http, session)["status"] == "finished"
    complete(http).raise_for_status()
