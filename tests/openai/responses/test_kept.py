"""Responses that the server keeps: clients read, list, cancel and delete their own, until a session gives way."""

from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.domain.errors import NotFound, SessionLimit
from app.openai.response_events import BackgroundResponses, Event
from app.openai.response_input import ResponseBody
from app.openai.response_store import UnstoredConversation
from app.routers.api_calls import ApiCall
from app.routers.response_call import start_response
from app.wire.calls import IgnoredFields
from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference
from tests.openai.responses.asking import CALLING, GREEDY, LONG
from tests.serving import running_services, serve
from tests.waiting import wait_until


def test_a_response_can_be_read_again_until_it_is_deleted_with_its_session(sdk: Any, http: httpx.Client) -> None:
    raw = sdk.responses.with_raw_response.create(**GREEDY, input="Hello", instructions="Be brief.", user="Ada")
    made, session = raw.parse(), f"/v1/sessions/{raw.headers['x-session-id']}"
    assert sdk.responses.retrieve(made.id) == made
    events = [*sdk.responses.retrieve(made.id, stream=True)]
    assert [event.sequence_number for event in events] == [0, 1, 2, 3]
    assert (events[1].item, events[2].item, events[3].response) == (made.output[0], made.output[0], made)
    assert [*sdk.responses.retrieve(made.id, stream=True, starting_after=9)] == events[3:]
    with pytest.raises(openai.BadRequestError, match="incomplete"):
        sdk.responses.cancel(made.id)
    assert http.get(session).status_code == 200
    sdk.responses.delete(made.id)
    assert http.get(session).status_code == 404
    with pytest.raises(openai.NotFoundError):
        sdk.responses.cancel(made.id)


def test_the_input_comes_in_pages(sdk: Any, http: httpx.Client) -> None:
    items: Any = [{"role": "user", "content": f"Number {number}"} for number in range(5)]
    made = sdk.responses.create(**GREEDY, input=items)

    def texts(**query: Any) -> list[str]:
        listed: Any = sdk.responses.input_items.list(made.id, **query)
        return [item.content[0].text for item in listed]

    in_order = [f"Number {number}" for number in range(5)]
    assert texts(order="asc") == in_order
    assert texts() == in_order[::-1]
    assert texts(order="asc", limit=2) == in_order  # the SDK reads page after page
    first = http.get(f"/v1/responses/{made.id}/input_items", params={"order": "asc", "limit": 2}).json()
    assert (len(first["data"]), first["has_more"], first["object"]) == (2, True, "list")
    assert first["last_id"] == first["data"][-1]["id"]
    wrong = http.get(f"/v1/responses/{made.id}/input_items", params={"after": "msg_0"})
    assert_error(wrong, 400, "field_out_of_range", param="after")


def test_a_deleted_response_is_gone_but_not_for_those_after_it(sdk: Any, http: httpx.Client) -> None:
    first = sdk.responses.create(**GREEDY, input="One")
    second = sdk.responses.create(**GREEDY, input="Two", previous_response_id=first.id)
    expected = sdk.responses.create(**GREEDY, input="Three", previous_response_id=second.id, store=False)
    assert http.delete(f"/v1/responses/{first.id}").json() == {"id": first.id, "object": "response", "deleted": True}
    for answer in (http.get(f"/v1/responses/{first.id}"), http.delete(f"/v1/responses/{first.id}")):
        assert_error(answer, 404, "not_found", param="response_id")
    with pytest.raises(openai.NotFoundError):
        sdk.responses.create(**GREEDY, input="x", previous_response_id=first.id)
    third = sdk.responses.create(**GREEDY, input="Three", previous_response_id=second.id)
    assert third.output_text == expected.output_text


def test_a_running_response_can_be_cancelled(sdk: Any, http: httpx.Client) -> None:
    before = sdk.responses.create(**GREEDY, input="One")
    with sdk.responses.create(**LONG, previous_response_id=before.id, stream=True) as stream:
        running = next(iter(stream)).response.id
        assert sdk.responses.retrieve(running).status == "in_progress"
        early = http.get(f"/v1/responses/{running}", params={"stream": "true"})
        assert_error(early, 400, "field_out_of_range", param="stream")
        refused = http.delete(f"/v1/responses/{running}")
        assert "cancel" in assert_error(refused, 400, "malformed_request", param="response_id")
        assert sdk.responses.cancel(running).status == "cancelled"
        last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert sdk.responses.retrieve(running).status == "cancelled"
    again = http.post(f"/v1/responses/{running}/cancel")
    assert "cancelled" in assert_error(again, 400, "malformed_request", param="response_id")
    with pytest.raises(openai.BadRequestError, match="cannot be continued"):
        sdk.responses.create(**GREEDY, input="x", previous_response_id=running)
    assert sdk.responses.create(**GREEDY, input="Two", previous_response_id=before.id).status == "incomplete"


def test_a_response_whose_turn_is_cancelled_can_be_read_again(sdk: Any, http: httpx.Client) -> None:
    def cancels_turn() -> bool:
        running = http.get("/v1/sessions", params={"state": "running"}).json()["data"]
        return bool(running) and http.post(f"/v1/sessions/{running[0]['id']}/cancel").is_success

    with ThreadPoolExecutor() as pool:
        made = pool.submit(sdk.responses.create, **LONG)
        wait_until(cancels_turn)
        assert sdk.responses.retrieve(made.result().id).status == made.result().status == "cancelled"


def test_a_running_response_cannot_be_continued(sdk: Any, http: httpx.Client) -> None:
    with sdk.responses.create(**LONG, stream=True) as stream:
        running = next(iter(stream)).response.id
        body = {"model": MODEL, "input": "x", "previous_response_id": running}
        for store in (True, False):
            refused = http.post("/v1/responses", json={**body, "store": store})
            message = assert_error(refused, 400, "field_out_of_range", param="previous_response_id")
            assert "in_progress" in message
        assert sdk.responses.retrieve(running).status == "in_progress"


def test_a_client_that_goes_away_cancels_its_response(sdk: Any) -> None:
    with sdk.responses.create(**LONG, stream=True) as stream:
        created: Any = next(iter(stream))
    for _ in range(500):
        if (status := sdk.responses.retrieve(created.response.id).status) != "in_progress":
            break
    assert status == "cancelled"


def test_a_response_in_the_background_goes_on_without_its_client(sdk: Any) -> None:
    asked = {**GREEDY, "max_output_tokens": 300, "input": "Hello"}
    in_background = {**asked, "background": True, "stream": True, "extra_headers": {"Idempotency-Key": "background"}}
    with sdk.responses.create(**in_background) as stream:
        begun = [next(stream), next(stream)]
    made = begun[0].response
    assert ([each.type for each in begun], made.status) == (["response.created", "response.queued"], "queued")
    rest = [*sdk.responses.retrieve(made.id, stream=True, starting_after=1)]
    assert (rest[0].type, rest[-1].type) == ("response.in_progress", "response.incomplete")
    kept = sdk.responses.retrieve(made.id)
    assert rest[-1].response == kept
    deltas = [event.delta for event in rest if event.type == "response.output_text.delta"]
    assert "".join(deltas) == kept.output_text == sdk.responses.create(**asked).output_text
    for events in (sdk.responses.retrieve(made.id, stream=True), sdk.responses.create(**in_background)):
        assert [*events] == begun + rest
    assert [*sdk.responses.retrieve(made.id, stream=True, starting_after=9999)] == rest[-1:]
    assert sdk.responses.create(**GREEDY, input="And?", previous_response_id=made.id).status == "incomplete"


def test_a_response_in_the_background_is_ended_by_its_cancel_alone(sdk: Any) -> None:
    asked: Any = {**LONG, "background": True, "extra_headers": {"Idempotency-Key": "cancelled"}}
    made = sdk.responses.create(**asked)
    assert (made.status, made.background) == ("queued", True)
    assert sdk.responses.create(**asked) == made
    assert sdk.responses.retrieve(made.id).status in ("queued", "in_progress")
    cancelled = [sdk.responses.cancel(made.id) for _ in range(2)]
    assert cancelled == [sdk.responses.retrieve(made.id)] * 2
    assert cancelled[0].status == "cancelled"
    assert [*sdk.responses.retrieve(made.id, stream=True)][-1].response == cancelled[0]
    sdk.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(made.id, stream=True)


async def test_events_of_old_responses_are_forgotten_for_new_ones() -> None:
    async def events() -> AsyncGenerator[Event, None]:
        yield {"type": "response.created", "response": "x" * 100}

    kept = BackgroundResponses(most_bytes=200)
    followed = [kept.begin(name, events(), AsyncExitStack()) for name in "abc"]
    for each in followed:
        assert [event async for event in each.events(7)] == [event async for event in each.events()]
    await kept.close()
    assert [kept.find(name) for name in "abc"] == [None, None, followed[2]]


@pytest.fixture(scope="module")
def guarded(reference: Reference) -> Iterator[dict[str, openai.OpenAI]]:
    """Clients of two tenants. Their server keeps four responses, which have room for 32 KiB."""
    keys = ("ours", "theirs")
    limits: Any = {"max_responses": 4, "max_responses_bytes": 32 << 10}
    with serve(model=str(reference.folder), api_keys=keys, **limits) as url, ExitStack() as ends:
        yield {key: ends.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)) for key in keys}


def is_kept(sdk: Any, response: Any) -> bool:
    try:
        return bool(sdk.responses.retrieve(response.id) == response)
    except openai.NotFoundError:
        return False


def test_owners_never_see_each_others_responses(guarded: dict[str, Any]) -> None:
    ours, theirs = guarded["ours"].responses, guarded["theirs"].responses
    made = ours.create(**GREEDY, input="Secret")
    reference: Any = [{"type": "item_reference", "id": made.output[0].id}]
    attempts: tuple[Callable[[], object], ...] = (
        lambda: theirs.retrieve(made.id),
        lambda: theirs.delete(made.id),
        lambda: theirs.cancel(made.id),
        lambda: theirs.input_items.list(made.id),
        lambda: theirs.create(model=MODEL, input="x", previous_response_id=made.id),
        lambda: theirs.create(model=MODEL, input=reference),
    )
    for attempt in attempts:
        with pytest.raises(openai.NotFoundError):
            attempt()
    assert ours.retrieve(made.id) == made
    thought: Any = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * (33 << 10)}]}
    with pytest.raises(openai.BadRequestError, match="more bytes than are kept"):
        guarded["ours"].conversations.create(items=[thought])


@pytest.mark.parametrize(
    ("size", "goes_on", "most"), [(1, False, 4), (1, True, 9), (500, False, 6), (500, True, 6)], ids=str
)
def test_an_owner_pushes_out_its_own_responses(guarded: dict[str, Any], size: int, goes_on: bool, most: int) -> None:
    ours, theirs = guarded["ours"], guarded["theirs"]
    asked: Any = {**GREEDY, "metadata": {f"label {number}": "x" * size for number in range(12)}}
    kept = theirs.responses.create(**GREEDY, input="Theirs")
    made = [ours.responses.create(**asked, input="First")]
    for number in range(8):
        previous: Any = {"previous_response_id": made[-1].id} if goes_on and is_kept(ours, made[-1]) else {}
        made.append(ours.responses.create(**asked, input=f"Number {number}", **previous))
    assert is_kept(theirs, kept)
    left = [each for each in made if is_kept(ours, each)]
    assert 0 < len(left) <= most
    assert left == made[-len(left) :]


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


def test_a_running_response_stays(small: tuple[Any, httpx.Client], slow_steps: None) -> None:
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


def test_a_response_whose_client_left_early_is_forgotten(openai_url: str, http: httpx.Client, slow_steps: None) -> None:
    def sessions() -> list[str]:
        return [session["state"] for session in http.get("/v1/sessions", params={"limit": 100}).json()["data"]]

    before = sorted(sessions())
    with httpx.Client(base_url=openai_url) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/responses", json={"model": MODEL, "input": "x", "ignore_eos": True}, timeout=0.3)
    wait_until(lambda: sorted(sessions()) == before)


async def test_a_response_stays_until_it_is_kept() -> None:
    async with running_services(max_sessions=1) as services, AsyncExitStack() as cleanup:
        asked = {"model": services.info.name, "input": "x", "max_output_tokens": 4, "ignore_eos": True}
        body = ResponseBody.model_validate(asked)
        call = ApiCall(services, None, cleanup, IgnoredFields(strict=False))
        run = await start_response(call, UnstoredConversation(services.sessions), body)
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
