"""Turns: what they say, how they end, and what is refused."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest

from app.domain.values import SamplingParams, StopRule, Ticket
from app.engine_process.turn import Turn
from app.main import load_app
from app.messages import Paused, TurnFinished
from app.routers.dependencies import Services
from app.routers.turns import turn_events
from app.sessions.charges import BYTES_EACH
from app.sessions.side_work import Lane
from app.text.generation import TextChunk, TextRule, TurnReader
from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import arm, generate, open_session, resume
from tests.routers.generating import GREEDY, PROMPT, streaming, wait_until_idle
from tests.serving import tiny_settings
from tests.taking_turns import start_turn
from tests.waiting import until


def test_no_new_tokens_goes_on_where_the_turn_before_stopped(http: httpx.Client, session: str) -> None:
    whole = http.post(f"{session}/generate", json={**GREEDY, "max_tokens": 8}).json()["token_ids"]
    http.post(f"{session}/rewind", json={"to_token": 4})
    parts = [
        http.post(f"{session}/generate", json={**GREEDY, "token_ids": [], "max_tokens": 4}).json()["token_ids"]
        for _ in range(2)
    ]
    assert parts[0] + parts[1] == whole


def test_without_max_tokens_a_turn_fills_the_context(http: httpx.Client, session: str) -> None:
    turn = http.post(f"{session}/generate", json={**PROMPT, "token_ids": [5] * 1000}).json()
    assert len(turn["token_ids"]) == 24
    full = http.post(f"{session}/generate", json={"prompt": "more"})
    message = assert_error(full, 400, "context_length_exceeded", param="prompt")
    assert "1024" in message
    chat = http.post(f"{session}/generate", json={"messages": [{"role": "user", "content": "more"}]})
    assert_error(chat, 400, "context_length_exceeded", param="messages")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_text_and_history(http: httpx.Client, session: str, stream: bool) -> None:
    bias = {"logit_bias": {str(ord(letter)): 100 for letter in "ab"}}
    body = {**PROMPT, **bias, "max_tokens": 900, "stop": ["ab", "ba"], "seed": 3}
    if stream:
        with streaming(http, session, **body) as events:
            *parts, finished = list(events)
        turn = finished.json()
        assert "".join(part.json()["text"] for part in parts) == turn["text"]
    else:
        turn = http.post(f"{session}/generate", json=body).json()
    assert turn["finish_reason"] == "stop"
    assert set(turn["text"]) <= {"a"} or set(turn["text"]) <= {"b"}
    found = http.get(session).json()
    assert found["state"] == "idle"
    assert found["tokens"] == 4 + len(turn["token_ids"]) < 900
    assert turn["usage"]["completion_tokens"] == len(turn["token_ids"])
    assert http.post(f"{session}/generate", json={**PROMPT, "max_tokens": 1}).status_code == 200


@pytest.mark.usefixtures("slow_steps")
def test_a_client_that_leaves_a_whole_answer_cancels_its_turn(http: httpx.Client, session: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        http.post(f"{session}/generate", json={**PROMPT, "max_tokens": 1000}, timeout=0.05)
    assert wait_until_idle(http, session)["tokens"] < 1004


def test_a_session_that_is_closed_ends_its_stream(http: httpx.Client, session: str, slow_steps: None) -> None:
    with streaming(http, session, **PROMPT, max_tokens=900) as stream:
        next(stream)
        assert http.delete(session).status_code == 204
        *_, last = stream
    assert last.json()["finish_reason"] == "cancelled"


async def test_a_turn_is_refused_if_the_history_changes_while_its_text_waits_to_be_encoded() -> None:
    app = load_app(tiny_settings())
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), AsyncExitStack() as ends:
        services: Services = app.state.services
        http = await ends.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
        path = f"/v1/sessions/{(session := services.sessions.create()).id}/generate"
        async with AsyncExitStack() as places:
            for _ in range(max(1, (os.cpu_count() or 1) // 2)):
                await places.enter_async_context(services.side_work.turn(None, Lane.TEXT))
            late = asyncio.create_task(http.post(path, json={"prompt": "late", "max_tokens": 1}))
            await until(lambda: bool(services.side_work._free[None, Lane.TEXT]._waiters))
            other = start_turn(services.sessions, session, [5, 6], SamplingParams(seed=0), StopRule(max_tokens=1))
            await other.ended.wait()
        assert "changed" in assert_error(await late, 409, "wrong_state")
        assert len(session.history) == 3


async def test_a_bug_in_a_stream_is_an_event_and_logged(caplog: pytest.LogCaptureFixture, services: Services) -> None:
    class Broken(TurnReader):
        async def __aiter__(self) -> AsyncIterator[TextChunk | Paused | TurnFinished]:
            yield TextChunk("a", (1,))
            raise RuntimeError("the password is swordfish")

    session = services.sessions.create()
    reader = Broken(Turn(Ticket(0)), services.tokens, TextRule(), lambda keep: None, lambda: asyncio.sleep(0))
    *_, last = [event async for event in turn_events(session, reader)]
    assert last.startswith(b"event: error\n")
    assert b"internal_error" in last
    assert b"swordfish" not in last
    assert "swordfish" in caplog.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"beam_width": 2}, "beam_width"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        *(({"logit_bias": {key: 1}}, f"logit_bias.{key}") for key in ("05", "-5", "٥", "9" * 10)),
        ({"token_ids": None, "messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        ({"token_ids": None, "messages": [{"role": "user", "content": "", "mood": 1}]}, "messages.0.mood"),
    ],
)
def test_a_bad_field_is_named(http: httpx.Client, session: str, body: dict[str, object], param: str) -> None:
    response = http.post(f"{session}/generate", json={**PROMPT, **body})
    message = assert_error(response, 422, "field_out_of_range", param=param)
    assert param in message
    assert http.get(session).json()["tokens"] == 0


@pytest.mark.parametrize(("extra", "param"), [({}, None), ({"prompt": "a", "token_ids": [5]}, "token_ids")])
def test_one_kind_of_input_is_taken(
    http: httpx.Client, session: str, extra: dict[str, object], param: str | None
) -> None:
    response = http.post(f"{session}/generate", json={"max_tokens": 1, **extra})
    message = assert_error(response, 422, "field_out_of_range", param=param)
    assert "exactly one of prompt, messages and token_ids" in message


def test_too_many_tokens_are_refused_with_the_numbers(http: httpx.Client, session: str) -> None:
    response = http.post(f"{session}/generate", json={**PROMPT, "max_tokens": 1021})
    message = assert_error(response, 400, "context_length_exceeded", param="max_tokens")
    assert "1024" in message
    assert "1021" in message
    chat = {"messages": [{"role": "user", "content": "a" * 1_000_000}]}  # which is not tokenized
    refused = http.post(f"{session}/generate", json=chat)
    assert "at least" in assert_error(refused, 400, "context_length_exceeded", param="messages")


ECHOED, GENERATED, ALTERNATIVES = 40, 4, 1
OF_A_CALL = (ECHOED + GENERATED) * (ALTERNATIVES + 1)
"""Log-probabilities of an echoed prompt and its continuation."""


def complete(http: httpx.Client, *, prompts: int = 1, stream: bool = False) -> httpx.Response:
    model = http.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": [[5] * ECHOED] * prompts, "max_tokens": GENERATED, "echo": True}
    return http.post("/v1/completions", json={**body, "logprobs": ALTERNATIVES, "stream": stream})


def test_calls_of_all_its_size_are_answered_one_after_the_other_and_larger_ones_never(serve_with: ServeWith) -> None:
    http = serve_with(max_logprobs_bytes=2 * OF_A_CALL * BYTES_EACH)
    for stream in (False, True) * 3:
        complete(http, prompts=2, stream=stream).raise_for_status()
    refusal = assert_error(complete(http, prompts=3), 400, "field_out_of_range", param="logprobs")
    assert f"at most {2 * OF_A_CALL} fit max_logprobs_bytes" in refusal


def test_a_paused_turn_holds_what_it_may_yet_report(serve_with: ServeWith) -> None:
    http = serve_with(max_logprobs_bytes=OF_A_CALL * BYTES_EACH)
    session = open_session(http)
    arm(http, session, when={"pass": "prefill"})
    turn = {"token_ids": [5] * ECHOED, "max_tokens": GENERATED, "logprobs": 0, "ignore_eos": True}
    assert generate(http, session, **turn)["status"] == "paused"
    refused = complete(http)
    assert "max_logprobs_bytes" in assert_error(refused, 429, "logprobs_full")
    assert refused.headers["retry-after"] == "1"
    assert resume(http, session)["status"] == "finished"
    complete(http).raise_for_status()


def test_an_empty_session_cannot_go_on_from_nothing(http: httpx.Client, session: str) -> None:
    response = http.post(f"{session}/generate", json={"token_ids": []})
    assert "at least 1 token" in assert_error(response, 422, "field_out_of_range", param="token_ids")
