from __future__ import annotations

import threading

import httpx
import pytest

from tests.errors import assert_error
from tests.routers.generating import GREEDY, PROMPT, streaming


def test_a_turn_answers_whole(http: httpx.Client, session: str) -> None:
    turn = http.post(f"{session}/generate", json={**PROMPT, "max_tokens": 6}).json()
    assert turn["status"] == "finished"
    assert turn["finish_reason"] == "length"
    assert len(turn["token_ids"]) == 6
    assert turn["checkpoint"] is None
    assert turn["usage"] == {
        "prompt_tokens": 4,
        "cached_tokens": 0,
        "completion_tokens": 6,
        "tokens_recomputed": 0,
    }
    assert "logprobs" not in turn


def test_a_stream_says_the_same_as_the_whole_answer(http: httpx.Client, session: str) -> None:
    whole = http.post(f"{session}/generate", json={**GREEDY, "max_tokens": 12, "logprobs": 2}).json()
    http.post(f"{session}/rewind", json={"to_token": 0})
    with streaming(http, session, **GREEDY, max_tokens=12, logprobs=2) as stream:
        *tokens, finished = list(stream)
    assert [event.event for event in tokens] == ["token"] * len(tokens)
    assert finished.event == "finished"
    last = finished.json()
    parts = [event.json() for event in tokens]
    assert "".join(part["text"] for part in parts) == last["text"] == whole["text"]
    assert [token for part in parts for token in part["token_ids"]] == last["token_ids"] == whole["token_ids"]
    streamed = [entry for part in parts for entry in part["logprobs"]]
    assert [entry["token_id"] for entry in streamed] == last["token_ids"]
    assert all(len(entry["top"]) == 2 and entry["top"][0]["logprob"] <= 0 for entry in streamed)
    assert streamed == last["logprobs"]


def test_only_new_tokens_travel(http: httpx.Client, session: str) -> None:
    """Two turns leave and see the same history as one turn with everything."""
    first = http.post(f"{session}/generate", json={**GREEDY, "max_tokens": 4}).json()
    second = http.post(f"{session}/generate", json={**GREEDY, "max_tokens": 4}).json()
    assert second["usage"]["prompt_tokens"] == 4 + 4 + 4
    assert second["usage"]["cached_tokens"] >= 7
    other = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
    everything = [*PROMPT["token_ids"], *first["token_ids"], *PROMPT["token_ids"]]
    fresh = http.post(f"{other}/generate", json={**GREEDY, "token_ids": everything, "max_tokens": 4}).json()
    assert fresh["token_ids"] == second["token_ids"]


def test_no_new_tokens_goes_on_where_the_turn_before_stopped(http: httpx.Client, session: str) -> None:
    whole = http.post(f"{session}/generate", json={**GREEDY, "max_tokens": 8}).json()["token_ids"]
    http.post(f"{session}/rewind", json={"to_token": 4})
    parts = [
        http.post(f"{session}/generate", json={**GREEDY, "token_ids": [], "max_tokens": 4}).json()["token_ids"]
        for _ in range(2)
    ]
    assert parts[0] + parts[1] == whole


def test_max_tokens_0_computes_the_prompt_and_samples_nothing(http: httpx.Client, session: str) -> None:
    turn = http.post(f"{session}/generate", json={**PROMPT, "max_tokens": 0}).json()
    assert turn["token_ids"] == []
    assert turn["finish_reason"] == "length"
    assert http.get(session).json()["tokens"] == 4


def test_without_max_tokens_a_turn_fills_the_context(http: httpx.Client, session: str) -> None:
    turn = http.post(f"{session}/generate", json={**PROMPT, "token_ids": [5] * 1000}).json()
    assert len(turn["token_ids"]) == 24
    full = http.post(f"{session}/generate", json={"prompt": "more"})
    message = assert_error(full, 400, "context_length_exceeded", param="prompt")
    assert "1024" in message
    chat = http.post(f"{session}/generate", json={"messages": [{"role": "user", "content": "more"}]})
    assert_error(chat, 400, "context_length_exceeded", param="messages")


def test_the_same_seed_gives_the_same_tokens(http: httpx.Client, session: str) -> None:
    def tokens(seed: int) -> list[int]:
        turn = http.post(f"{session}/generate", json={**PROMPT, "max_tokens": 16, "seed": seed}).json()
        http.post(f"{session}/rewind", json={"to_token": 0})
        found: list[int] = turn["token_ids"]
        return found

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_a_stop_token_ends_the_turn(http: httpx.Client, session: str) -> None:
    whole = http.post(f"{session}/generate", json={**GREEDY, "max_tokens": 12}).json()["token_ids"]
    http.post(f"{session}/rewind", json={"to_token": 0})
    stop = next(token for token in whole if token != whole[0])
    turn = http.post(f"{session}/generate", json={**GREEDY, "max_tokens": 12, "stop_token_ids": [stop]}).json()
    assert turn["finish_reason"] == "stop"
    assert turn["token_ids"] == whole[: whole.index(stop) + 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_text_and_history_and_the_session_goes_on(
    http: httpx.Client, session: str, stream: bool
) -> None:
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


def test_sessions_generate_at_the_same_time_and_apart(http: httpx.Client) -> None:
    """Every one of 8 concurrent greedy turns gives what it gives alone."""
    paths = [f"/v1/sessions/{http.post('/v1/sessions').json()['id']}" for _ in range(8)]
    answers: dict[int, list[int]] = {}

    def run(index: int) -> None:
        body = {**GREEDY, "token_ids": [10 + index, 20, 30], "max_tokens": 20}
        answers[index] = http.post(f"{paths[index]}/generate", json=body).json()["token_ids"]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(answers)
    for index in range(8):
        http.post(f"{paths[index]}/rewind", json={"to_token": 0})
        run(index)
    assert answers == together
