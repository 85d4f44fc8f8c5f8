"""WebSockets whose clients send more than their share, or not what they should."""

import asyncio
import json
import socket
import struct
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from websockets.frames import Frame, Opcode
from websockets.sync.client import connect

from app.machine.budget import Share
from app.web.bodies import body_budget
from app.web.protocol import WebSocketProtocol
from tests.waiting import settled
from tests.web.connections.conftest import GET, HEADER, LIMIT, PATIENCE_S, Edge, read_answer, read_to_end, serving

PONG = b"\x8a\x00"
HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" + HEADER + b"\r\n"
)


def frame(opcode: Opcode, content: bytes = b"", *, fin: bool = True) -> bytes:
    return Frame(opcode, content, fin).serialize(mask=True)


def opened(server: Edge) -> socket.socket:
    """A WebSocket to which a test writes bytes of its own."""
    connection = server.connect(HANDSHAKE)
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1)
    assert received.startswith(b"HTTP/1.1 101 ")
    return connection


def closing_code(received: bytes) -> int:
    """That of the close frame, the last one that the server sent."""
    opcode = received.rindex(b"\x88")
    (code,) = struct.unpack("!H", received[opcode + 2 : opcode + 4])
    return int(code)


@pytest.mark.parametrize(
    "flood",
    [
        frame(Opcode.PING) * 5000,
        frame(Opcode.PONG, b"four") * 5000,
        frame(Opcode.TEXT, fin=False) + frame(Opcode.CONT, fin=False) * 5000,
    ],
    ids=["pings", "pongs", "fragments"],
)
def test_a_flood_of_small_frames_ends_the_connection(server: Edge, flood: bytes) -> None:
    connection = opened(server)
    connection.sendall(flood)
    received = read_to_end(connection)
    assert closing_code(received) == 1008
    assert received.count(PONG) < 2000
    assert read_answer(server.connect(GET)).startswith(b"HTTP/1.1 200 ")


def test_pings_and_fragments_in_measure_are_taken_and_nothing_is_compressed(server: Edge) -> None:
    with connect(server.url.replace("http", "ws") + "/v1/responses", open_timeout=PATIENCE_S) as client:
        assert client.request is not None
        assert client.response is not None
        assert "permessage-deflate" in client.request.headers["Sec-WebSocket-Extensions"]
        assert "Sec-WebSocket-Extensions" not in client.response.headers
        for _ in range(100):
            assert client.ping().wait(PATIENCE_S)
        client.send(part for part in ["[", *[" " * 40] * 200, "]"])
        assert json.loads(client.recv(PATIENCE_S))["error"]["param"] == "type"


def test_messages_that_come_together_are_all_answered(server: Edge) -> None:
    connection = opened(server)
    connection.sendall(b"".join(frame(Opcode.TEXT, b"[%d]" % number) for number in range(900)))
    received = b""
    while received.count(b"response.create") < 900:
        part = connection.recv(1 << 16)
        assert part
        received += part


@pytest.mark.parametrize("fragments", [1, 5])
def test_a_message_over_the_limit_ends_the_connection(server: Edge, fragments: int) -> None:
    connection = opened(server)
    part = b" " * (LIMIT // fragments + 1)
    for number in range(fragments):
        opcode = Opcode.CONT if number else Opcode.TEXT
        connection.sendall(frame(opcode, part, fin=number == fragments - 1))
    assert closing_code(read_to_end(connection)) == 1009


def test_messages_that_never_end_leave_room_for_those_of_others() -> None:
    half = frame(Opcode.TEXT, b" " * (LIMIT - 100), fin=False)
    with serving(max_request_bytes=LIMIT, max_bodies_bytes=3 * LIMIT) as server:
        kept = opened(server)
        kept.sendall(half)
        kept.sendall(frame(Opcode.PING))
        assert kept.recv(16) == PONG  # all of it has come
        refused = opened(server)
        refused.sendall(half)
        assert closing_code(read_to_end(refused)) == 1013
        kept.sendall(frame(Opcode.CONT, b"{}"))
        assert b"response.create" in kept.recv(1 << 16)  # the message is over, and so is its part of the budget
        third = opened(server)
        third.sendall(half + frame(Opcode.CONT, b"{}"))
        assert b"response.create" in third.recv(1 << 16)


@pytest.mark.parametrize(
    "changed", [HANDSHAKE.replace(b"Version: 13", b"Version: 12"), HANDSHAKE.replace(b"-Key:", b"-Lock:")]
)
def test_a_handshake_that_is_wrong_is_answered_and_is_no_error(
    server: Edge, changed: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_to_end(server.connect(changed)).startswith(b"HTTP/1.1 400 ")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def protocol_of(app: Any) -> tuple[WebSocketProtocol, Mock]:
    """A connection that has sent its handshake to an application, and its transport."""
    config = uvicorn.Config(app, log_config=None)
    protocol = WebSocketProtocol(config=config, server_state=uvicorn.server.ServerState(), app_state={})
    transport = Mock(spec=asyncio.Transport, **{"is_closing.return_value": False})
    protocol.connection_made(transport)
    protocol.data_received(HANDSHAKE)
    return protocol, transport


async def test_who_does_not_wait_for_the_handshake_is_closed() -> None:
    async def slow(scope: object, receive: Any, send: object) -> None:
        assert (await receive())["type"] == "websocket.connect"
        assert (await receive())["type"] == "websocket.disconnect"

    protocol, transport = protocol_of(slow)
    transport.close.assert_not_called()
    protocol.data_received(b"not a frame")
    transport.close.assert_called_once()
    protocol.connection_lost(None)
    await asyncio.gather(*protocol.tasks)


async def test_a_message_that_comes_counts_while_the_application_has_one() -> None:
    share, turn = Share(body_budget(1 << 30), "somebody"), asyncio.Event()

    async def busy(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["share"] = share
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        await turn.wait()
        await receive()

    protocol, _ = protocol_of(busy)
    await settled()
    protocol.data_received(frame(Opcode.TEXT, bytes(1000)))
    await settled()
    protocol.data_received(frame(Opcode.TEXT, bytes(5000), fin=False) + frame(Opcode.CONT, bytes(3000))[:2000])
    assert 1000 + 5000 + 1900 < share.held < 1000 + 5000 + 2100
    turn.set()
    await settled()
    assert 5000 + 1900 < share.held < 5000 + 2100  # the application is done with the first
    protocol.connection_lost(None)


async def test_a_server_ends_while_a_client_that_has_closed_reads_nothing() -> None:
    async def accepting(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()

    protocol, transport = protocol_of(accepting)
    await settled()
    protocol.data_received(frame(Opcode.CLOSE, struct.pack("!H", 1000)))
    await settled()
    protocol.shutdown()  # what was sent before still waits for the client
    assert transport.close.called
    protocol.connection_lost(None)
    await asyncio.gather(*protocol.tasks)
