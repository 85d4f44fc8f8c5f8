"""An answer leaves the server only while it may answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.journal.journal import Journal
from app.web.middleware.lease_gate import LeaseGate

START: Message = {"type": "http.response.start", "status": 200, "headers": []}
PART: Message = {"type": "http.response.body", "body": b"part", "more_body": True}
END: Message = {"type": "http.response.body", "body": b"end"}


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path, 3600)
    yield journal
    journal.close()


async def answer(journal: Journal, messages: list[Message], lost_after: int | None, **scope: Any) -> tuple[Any, int]:
    """What is sent of these messages where the lease is lost after some of them, and how often a stream was cut."""
    lease: Any = journal.lease
    sent, cuts = list[Message](), list[None]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for number, message in enumerate(messages):
            if number == lost_after:
                lease._tenure.lose()
            await send(message)

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    if lost_after == -1:
        lease._tenure.lose()
    state = {"cut": lambda: cuts.append(None)}
    whole = {"type": "http", "path": "/v1/sessions/ses_1", "method": "GET", "state": state, **scope}
    await LeaseGate(app, lease)(whole, receive, send)
    return sent, len(cuts)


@pytest.mark.parametrize(("lost_after", "path"), [(None, "/v1/sessions"), (0, "/health")])
async def test_all_of_it_leaves_while_the_lease_is_held_or_of_the_server_itself(
    journal: Journal, lost_after: int | None, path: str
) -> None:
    assert await answer(journal, [START, PART, END], lost_after, path=path) == ([START, PART, END], 0)


@pytest.mark.parametrize("lost_after", [-1, 0])
async def test_an_answer_that_comes_too_late_becomes_an_error(journal: Journal, lost_after: int) -> None:
    (start, body), cuts = await answer(journal, [START, PART, END], lost_after)
    assert (start["status"], json.loads(body["body"])["error"]["code"], cuts) == (503, "fenced", 0)


@pytest.mark.parametrize("lost_after", [1, 2])
async def test_a_stream_is_cut_off(journal: Journal, lost_after: int) -> None:
    assert await answer(journal, [START, PART, END], lost_after) == ([START, PART, END][:lost_after], 1)


async def test_a_websocket_is_closed(journal: Journal) -> None:
    word: Message = {"type": "websocket.send", "text": "word"}
    sent, _ = await answer(journal, [word, word, word], 1, type="websocket")
    assert sent == [word, {"type": "websocket.close", "code": 1013, "reason": "fenced"}]
