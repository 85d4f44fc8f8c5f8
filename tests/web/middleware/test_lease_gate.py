"""An answer leaves the server only while it may answer."""

import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.domain.errors import Fenced
from app.web.middleware import LeaseGate

START: Message = {"type": "http.response.start", "status": 200, "headers": []}
PART: Message = {"type": "http.response.body", "body": b"part", "more_body": True}
END: Message = {"type": "http.response.body", "body": b"end"}


class Lease:
    """Held until a test loses it."""

    holds = True

    def require(self) -> None:
        if not self.holds:
            raise Fenced("another server has the folder")


async def answer(messages: list[Message], lost_after: int | None, **scope: Any) -> tuple[Any, int]:
    """What is sent of these messages where the lease is lost after some of them (-1: before the request), and how often
    a stream was cut.
    """
    lease: Any = Lease()
    lease.holds = lost_after != -1
    sent, cuts = list[Message](), list[None]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for number, message in enumerate(messages):
            if number == lost_after:
                lease.holds = False
            await send(message)

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    state = {"cut": lambda: cuts.append(None)}
    whole = {"type": "http", "path": "/v1/sessions/ses_1", "method": "GET", "state": state, **scope}
    await LeaseGate(app, lease)(whole, receive, send)
    return sent, len(cuts)


@pytest.mark.parametrize("lost_after", [-1, 0])
async def test_an_answer_that_comes_too_late_becomes_an_error(lost_after: int) -> None:
    (start, body), cuts = await answer([START, PART, END], lost_after)
    assert (start["status"], json.loads(body["body"])["error"]["code"], cuts) == (503, "fenced", 0)


@pytest.mark.parametrize("lost_after", [1, 2])
async def test_a_stream_is_cut_off(lost_after: int) -> None:
    assert await answer([START, PART, END], lost_after) == ([START, PART, END][:lost_after], 1)


async def test_a_websocket_is_closed() -> None:
    word: Message = {"type": "websocket.send", "text": "word"}
    sent, _ = await answer([word, word, word], 1, type="websocket")
    assert sent == [word, {"type": "websocket.close", "code": 1013, "reason": "fenced"}]
