"""`/v1/responses` as a WebSocket, as `responses.connect()` of the SDK speaks it."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai.resources.responses.responses import ResponsesConnection
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from app.routers.responses_socket import ResponseConnection
from app.sessions.side_work import Lane, SideWork
from app.web.bodies import LARGE_BYTES
from tests.openai.conftest import MODEL
from tests.openai.responses.asking import CALLING, GREEDY, LETTERS, LONG, LOOK_UP, folded, output_of
from tests.serving import serve
from tests.waiting import settled, until, wait_until

LAST = ("response.completed", "response.incomplete", "response.failed", "error")


def ask(connection: ResponsesConnection, **asked: Any) -> list[Any]:
    """The events of a response."""
    send(connection, **asked)
    return read(connection)


def send(connection: ResponsesConnection, **asked: Any) -> None:
    extra = asked.pop("extra_body", {})
    event: Any = {"type": "response.create", **asked, **extra}
    connection.send(event)


def read(connection: ResponsesConnection) -> list[Any]:
    events: list[Any] = []
    while not events or events[-1].type not in LAST:
        events.append(connection.recv())
    return events


@pytest.fixture
def socket(sdk: Any) -> Iterator[ResponsesConnection]:
    with sdk.responses.connect() as connection:
        yield connection


@pytest.mark.parametrize("store", [True, False])
def test_three_turns_with_a_function(socket: ResponsesConnection, sdk: Any, http: httpx.Client, store: bool) -> None:
    first = ask(socket, **CALLING, input="Look it up", store=store)[-1].response
    (call,) = first.output
    assert call.type == "function_call"
    asked: Any = {**LETTERS, "tools": [LOOK_UP], "tool_choice": "none", "store": store}
    second = ask(socket, **asked, input=[output_of(call.call_id)], previous_response_id=first.id)[-1].response
    third = ask(socket, **asked, input="Thanks", previous_response_id=second.id)[-1].response
    assert third.usage.input_tokens_details.cached_tokens >= second.usage.input_tokens
    if store:
        assert sdk.responses.retrieve(third.id).output_text == third.output_text
    else:
        assert http.get(f"/v1/responses/{third.id}").status_code == 404
    whole: Any = [
        {"role": "user", "content": "Look it up"},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        output_of(call.call_id),
        *[item.model_dump(exclude_none=True) for item in second.output],
        {"role": "user", "content": "Thanks"},
    ]
    told = sdk.responses.create(**{**asked, "input": whole})
    assert third.output_text == told.output_text


def test_events_are_those_of_a_stream_and_the_first_names_ignored_fields(socket: ResponsesConnection, sdk: Any) -> None:
    streamed = folded(list(sdk.responses.create(**GREEDY, input="Hello", stream=True)))
    events = ask(socket, **GREEDY, input="Hello", user="a", reasoning={"effort": "low"}, background=True)
    assert folded(events) == streamed
    assert [event.sequence_number for event in events] == list(range(len(events)))
    named = [getattr(event, "ignored_fields", None) for event in events]
    assert named == ["background, reasoning"] + [None] * (len(events) - 1)


def test_query_parameters_of_the_handshake_are_named_too(sdk: Any) -> None:
    with sdk.responses.connect(extra_query={"api-version": "1"}) as connection:
        assert ask(connection, **GREEDY, input="Hello")[0].ignored_fields == "api-version"


def test_what_is_not_stored_is_known_to_its_connection_only(sdk: Any) -> None:
    with sdk.responses.connect() as one, sdk.responses.connect() as other:
        response = ask(one, **GREEDY, input="x", store=False)[-1].response
        (refused,) = ask(other, **GREEDY, input="y", previous_response_id=response.id, store=False)
        assert (refused.type, refused.status, refused.error.param) == ("error", 404, "previous_response_id")
        assert ask(one, **GREEDY, input="y", previous_response_id=response.id, store=False)[-1].response.id


def test_one_response_at_a_time(socket: ResponsesConnection) -> None:
    send(socket, **LONG, max_output_tokens=200)
    send(socket, **LONG)
    error = read(socket)[-1]
    assert (error.type, error.status) == ("error", 400)
    assert "one at a time" in error.error.message
    assert read(socket)[-1].type == "response.incomplete"  # the first goes on to its end


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("{", None),
        ('{"type": "response.steer"}', "type"),
        (f'{{"type": "response.create", "model": "{MODEL}", "input": "x", "temperature": -1}}', "temperature"),
        ('{"type": "response.create", "model": "nobody", "input": "x"}', "model"),
    ],
)
def test_a_mistake_is_told_and_the_connection_goes_on(
    socket: ResponsesConnection, message: str, param: str | None
) -> None:
    socket.send_raw(message)
    event: Any = socket.recv()
    assert (event.type, event.status in (400, 404), event.error.param) == ("error", True, param)
    assert event.error.message
    assert ask(socket, **GREEDY, input="x")[-1].type == "response.incomplete"


def test_closing_the_connection_cancels_and_forgets(sdk: Any, http: httpx.Client) -> None:
    before = http.get("/v1/memory").json()["sessions"]
    with sdk.responses.connect() as connection:
        ask(connection, **GREEDY, input="Found by its history", store=False)
        send(connection, **LONG)
        created: Any = connection.recv()
    wait_until(lambda: sdk.responses.retrieve(created.response.id).status == "cancelled")
    assert http.get("/v1/memory").json()["sessions"] == before + 2


def test_a_connection_needs_a_key() -> None:
    with serve(api_keys=("sesame",)) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(InvalidStatus) as refused:
                connect(f"{url.replace('http', 'ws', 1)}/v1/responses", additional_headers=headers)
            assert refused.value.response.status_code == 401
            assert b"invalid_api_key" in (refused.value.response.body or b"")


def test_a_handshake_that_is_not_understood_is_refused(openai_url: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{openai_url.replace('http', 'ws', 1)}/v1/responses", additional_headers={"X-Session-ID": ""})
    assert refused.value.response.status_code == 400
    assert b"is bound to one session" in (refused.value.response.body or b"")


async def test_a_large_event_has_its_turn_among_the_tenants_work() -> None:
    """It is parsed on the event loop, as bodies are."""
    side_work, sent, messages = SideWork(lambda owner: False), list[str](), asyncio.Queue[dict[str, str]]()

    async def send_text(text: str) -> None:
        sent.append(text)

    services = SimpleNamespace(side_work=side_work, info=SimpleNamespace(max_model_len=100))
    app, state = SimpleNamespace(state=SimpleNamespace(services=services)), SimpleNamespace(owner="a")
    websocket: Any = SimpleNamespace(app=app, state=state, send_text=send_text, receive=messages.get)
    unstored: Any = None
    serving = asyncio.create_task(ResponseConnection(websocket, None, unstored).serve())
    async with AsyncExitStack() as others:
        for _ in range(max(1, (os.cpu_count() or 1) // 2)):
            await others.enter_async_context(side_work.turn("a", Lane.TEXT))
        for text in ("small", " " * LARGE_BYTES):
            messages.put_nowait({"type": "websocket.receive", "text": text})
        await settled()
        assert len(sent) == 1  # the answer to the small one
    await until(lambda: len(sent) == 2)
    messages.put_nowait({"type": "websocket.disconnect"})
    await serving
