"""An answer leaves the server only while it may answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.journal.journal import Journal
from app.web.middleware.lease_gate import LeaseGate

START: Message = {"type": "http.response.start", "status": 200, "headers": []}
PART: Message = {"type": "http.response.body", "body": b"part", "more_body": True}
END: Message = {"type": "http.response.body", "body": b"end"}


class Client:
    """Asks for something, and loses the lease after some messages of the answer."""

    def __init__(self, folder: Path) -> None:
        self.sent: list[Message] = []
        self.cuts = 0
        self.journal = Journal(folder, 3600)

    def lose(self) -> None:
        assert self.journal.lease is not None
        self.journal.lease._tenure.lose()

    async def ask(self, messages: list[Message], *, lost_after: int | None, **scope: Any) -> None:
        def cut() -> None:
            self.cuts += 1

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            for number, message in enumerate(messages):
                if number == lost_after:
                    self.lose()
                await send(message)

        async def send(message: Message) -> None:
            self.sent.append(message)

        async def receive() -> Message:
            raise AssertionError

        assert self.journal.lease is not None
        whole = {"type": "http", "path": "/v1/sessions/ses_1", "method": "GET", "state": {"cut": cut}, **scope}
        await LeaseGate(app, self.journal.lease)(whole, receive, send)
        self.journal.close()

    @property
    def refusal(self) -> tuple[int, str]:
        start, body = self.sent
        return start["status"], json.loads(body["body"])["error"]["code"]


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path)


async def test_all_of_it_leaves_while_the_lease_is_held(client: Client) -> None:
    await client.ask([START, PART, END], lost_after=None)
    assert client.sent == [START, PART, END]


async def test_an_answer_that_comes_too_late_becomes_an_error(client: Client) -> None:
    await client.ask([START, PART, END], lost_after=0)
    assert client.refusal == (503, "fenced")
    assert client.cuts == 0


@pytest.mark.parametrize("lost_after", [1, 2])
async def test_a_stream_is_cut_off(client: Client, lost_after: int) -> None:
    await client.ask([START, PART, END], lost_after=lost_after)
    assert client.sent == [START, PART, END][:lost_after]
    assert client.cuts == 1


async def test_nothing_is_asked_of_a_server_without_the_lease(client: Client) -> None:
    client.lose()
    await client.ask([START, END], lost_after=None)
    assert client.refusal == (503, "fenced")


async def test_what_is_about_the_server_itself_is_answered(client: Client) -> None:
    await client.ask([START, END], lost_after=0, path="/health")
    assert client.sent == [START, END]


async def test_a_websocket_is_closed(client: Client) -> None:
    word: Message = {"type": "websocket.send", "text": "word"}
    await client.ask([word, word, word], lost_after=1, type="websocket")
    assert client.sent == [word, {"type": "websocket.close", "code": 1013, "reason": "fenced"}]
