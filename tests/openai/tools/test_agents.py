"""Agents that send the answers of their tools back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.openai.conftest import MODEL
from tests.openai.tools.asking import CALL, CHAT, NOW, TOOLS, check_calls
from tests.serving import serve


def test_a_call_that_ran_out_of_tokens_says_so_and_may_be_sent_back(sdk: openai.OpenAI, http: httpx.Client) -> None:
    """Frameworks ask again after it, with the call as it is."""
    bound: Any = {"extra_headers": {"X-Session-ID": "cut-short"}}
    cut = {**CALL, "max_tokens": 45, "tool_choice": NOW}
    raw = sdk.chat.completions.with_raw_response.create(**cut, **bound)
    (choice,) = raw.parse().choices
    assert choice.finish_reason == "length"
    with sdk.chat.completions.stream(**cut) as stream, pytest.raises(openai.LengthFinishReasonError):
        stream.get_final_completion()
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    with pytest.raises(ValueError, match=r"line 1 column \d+"):
        json.loads(call.function.arguments)
    assert http.get(f"/v1/sessions/{raw.headers['x-session-id']}").json()["phase"] == "compute"
    again: Any = [*CHAT, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Again."}]
    answer = sdk.chat.completions.create(**{**CALL, "messages": again}, tool_choice=NOW)
    assert check_calls(answer.choices[0].message) == ["now"]


def test_an_agent_that_signals_nothing_waits_off_the_device(sdk: openai.OpenAI, http: httpx.Client) -> None:
    bound: Any = {"extra_headers": {"X-Session-ID": "weather-agent"}}
    first = sdk.chat.completions.with_raw_response.create(**CALL, tool_choice="required", **bound)
    session = f"/v1/sessions/{first.headers['x-session-id']}"
    assert http.get(session).json()["phase"] == "io_wait"
    message = first.parse().choices[0].message
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls or ()]
    chat: Any = [*CHAT, message.model_dump(), *answers]
    second = sdk.chat.completions.create(**{**CALL, "messages": chat, "max_tokens": 4}, tool_choice="none", **bound)
    assert http.get(session).json()["phase"] == "compute"
    usage = second.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens > 0.8 * (first.parse().usage or usage).prompt_tokens


@pytest.fixture(scope="module")
def binding_url(roomy_model: Path) -> Iterator[str]:
    with serve(model=str(roomy_model), max_model_len=8192, bind_by_prefix=True, park_on_tool_calls=False) as url:
        yield url


def test_a_call_finds_its_session_by_the_history_that_it_continues(binding_url: str) -> None:
    with (
        openai.OpenAI(base_url=f"{binding_url}/v1", api_key="none", max_retries=0) as sdk,
        httpx.Client(base_url=binding_url) as http,
    ):
        chats: list[Any] = [[{"role": "user", "content": f"I am agent {name}."}] for name in "AB"]
        ids: list[set[str]] = [set(), set()]
        for _ in range(3):
            for chat, seen in zip(chats, ids, strict=True):
                raw = sdk.chat.completions.with_raw_response.create(
                    model=MODEL, messages=chat, tools=TOOLS, tool_choice=NOW, max_tokens=300
                )
                seen.add(raw.headers["x-session-id"])
                message = raw.parse().choices[0].message
                answers = [
                    {"role": "tool", "tool_call_id": each.id, "content": "1"} for each in message.tool_calls or ()
                ]
                chat += [message.model_dump(), *answers]
        assert [len(seen) for seen in ids] == [1, 1]
        assert ids[0] != ids[1]
        phases = [http.get(f"/v1/sessions/{name}").json()["phase"] for seen in ids for name in seen]
        assert phases == ["compute", "compute"]  # parking is off here
