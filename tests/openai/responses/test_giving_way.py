"""Kept responses at `--max-sessions`: the sessions of idle ones give way, and nothing is left of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.domain.errors import NotFound, SessionLimit
from app.openai.responses.body import ResponseBody
from app.openai.responses.memory import UnstoredConversation
from app.routers.openai.response_call import ResponseCall
from app.wire.extras.ignored_fields import IgnoredFields
from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference
from tests.openai.responses.asking import CALLING, GREEDY, LONG
from tests.serving import running_services, serve


@pytest.fixture(scope="module")
def small(reference: Reference) -> Iterator[tuple[Any, httpx.Client]]:
    """Clients of a server for two sessions: those that a test has left give way to the next test's."""
    with (
        serve(model=str(reference.folder), max_sessions=2) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as sdk,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        yield sdk, http


def status_of(http: httpx.Client, response: Any) -> int:
    return http.get(f"/v1/responses/{response.id}").status_code


def test_the_response_that_was_unused_for_longest_gives_way(small: tuple[Any, httpx.Client]) -> None:
    sdk, http = small
    first, second, third = [sdk.responses.create(**GREEDY, input=f"Number {number}") for number in range(3)]
    assert_error(http.get(f"/v1/responses/{first.id}"), 404, "not_found", param="response_id")
    body = {"model": MODEL, "input": "x", "previous_response_id": first.id}
    assert_error(http.post("/v1/responses", json=body), 404, "not_found", param="previous_response_id")
    assert [status_of(http, each) for each in (second, third)] == [200, 200]
    sdk.responses.create(**GREEDY, input="Again", previous_response_id=second.id)
    sdk.responses.create(**GREEDY, input="Last")
    assert [status_of(http, each) for each in (second, third)] == [200, 404]


def test_responses_give_way_to_calls_of_other_routes(small: tuple[Any, httpx.Client]) -> None:
    sdk, http = small
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    for path in ("/v1/chat/completions", "/v1/messages"):
        first, second = [sdk.responses.create(**GREEDY, input=f"Number {number}") for number in range(2)]
        assert http.post(path, json=body).status_code == 200
        assert [status_of(http, each) for each in (first, second)] == [404, 200]
        reference = {"model": MODEL, "input": [{"type": "item_reference", "id": first.output[0].id}]}
        assert_error(http.post("/v1/responses", json=reference), 404, "not_found", param="input")


def test_a_running_response_stays(small: tuple[Any, httpx.Client]) -> None:
    sdk, http = small
    idle = sdk.responses.create(**GREEDY, input="Idle")
    with sdk.responses.create(**LONG, stream=True) as stream:
        created = next(iter(stream))
        younger = sdk.responses.create(**GREEDY, input="Younger")
        assert [status_of(http, each) for each in (idle, younger)] == [404, 200]
        opened = http.post("/v1/sessions").json()["id"]
        assert_error(http.post("/v1/sessions"), 429, "session_limit")
        assert sdk.responses.retrieve(created.response.id).status == "in_progress"
    http.delete(f"/v1/sessions/{opened}").raise_for_status()


async def test_a_response_stays_until_it_is_kept() -> None:
    async with running_services(max_sessions=1) as services, AsyncExitStack() as cleanup:
        asked = {"model": services.info.name, "input": "x", "max_output_tokens": 4, "ignore_eos": True}
        body = ResponseBody.model_validate(asked)
        call = ResponseCall(services, None, UnstoredConversation(services.sessions))
        run = await call.start(body, IgnoredFields(strict=False), cleanup)
        events = run.events()
        async for event in events:
            if event["type"] == "response.output_text.done":
                break
        with pytest.raises(SessionLimit):
            services.sessions.create()
        assert [event["type"] async for event in events][-1] == "response.incomplete"
        assert services.responses.find(None, run.response.id).answer is run.response
        services.sessions.create()
        with pytest.raises(NotFound):
            services.responses.find(None, run.response.id)


def test_a_conversation_never_gives_way_to_its_own_branch(small: tuple[Any, httpx.Client]) -> None:
    sdk, http = small
    first = sdk.responses.create(**GREEDY, input="One")
    second = sdk.responses.create(**GREEDY, input="Two", previous_response_id=first.id)
    other = sdk.responses.create(**GREEDY, input="Other")
    branch = sdk.responses.create(**GREEDY, input="Branch", previous_response_id=first.id)
    assert [status_of(http, each) for each in (first, second, other, branch)] == [200, 200, 404, 200]


def test_a_response_that_waits_for_functions_gives_way_last(small: tuple[Any, httpx.Client]) -> None:
    sdk, http = small
    calling = sdk.responses.create(**CALLING, input="Look it up")
    younger = [sdk.responses.create(**GREEDY, input=f"Number {number}") for number in range(2)]
    assert [status_of(http, each) for each in (calling, *younger)] == [200, 404, 200]


def test_kept_responses_are_whole_after_a_restart_and_those_that_gave_way_stay_gone(tmp_path: Path) -> None:
    state: Any = {"max_sessions": 2, "state_dir": tmp_path}
    asked = {"model": "tiny-llama", "input": "x", "max_output_tokens": 4, "top_logprobs": 3}

    def kept(url: str) -> Any:
        return httpx.post(f"{url}/v1/responses", json=asked, timeout=30).raise_for_status().json()

    with serve(**state) as url:
        made = [kept(url) for _ in range(2)]
    with serve(**state) as url:
        made.append(kept(url))
    with serve(**state) as url, httpx.Client(base_url=url, timeout=30) as http:
        first, *others = [http.get(f"/v1/responses/{each['id']}") for each in made]
    assert first.status_code == 404
    assert [each.json() for each in others] == made[1:]
