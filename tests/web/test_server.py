"""A server: its port, its garbage, its end, SIGHUP while it loads, and streams that are quiet."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from typing import NoReturn

import pytest
from starlette.types import Message

import app.main
from app.cli import main
from app.domain.errors import FieldOutOfRange
from app.domain.values import ModelInfo
from app.main import create_app
from app.model_store.byte_tokenizer import byte_tokenizer
from app.model_store.model_tokenizer import ModelTokenizer
from app.tenants.tenancy import Tenancy
from app.text.tokenizer import Tokens
from app.web.connections.caps import Caps
from app.web.hangups import Hangups
from app.web.port import bind
from app.web.server import ENGINE_LOST, Server
from app.web.sse import KEEP_ALIVE, EventStream
from tests.bridge.test_executor import DyingEngine, info
from tests.serving import START_TIMEOUT_S, tiny_settings
from tests.waiting import wait_until
from tests.web.connections.conftest import serving

__all__ = ["info"]


@pytest.fixture
def lost_engine(info: ModelInfo) -> DyingEngine:
    """Dies when it is told to, and nobody starts another."""
    return DyingEngine(info)


async def test_small_answers_are_not_held_back() -> None:
    """With Nagle's algorithm, headers and body in two writes cost 40 ms."""
    delays_off: asyncio.Queue[int] = asyncio.Queue()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        await delays_off.put(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with bind("127.0.0.1", 0) as bound:
        async with await asyncio.start_server(answer, sock=bound):
            _, writer = await asyncio.open_connection(*bound.getsockname())
            assert await delays_off.get() != 0
            writer.close()


def test_a_port_that_another_server_has_taken_is_refused_before_it_listens() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(FieldOutOfRange, match="cannot listen"):
        bind("127.0.0.1", first.getsockname()[1])


def test_a_full_collection_of_garbage_passes_over_what_the_server_started_with() -> None:
    """It stops every turn as long as it lasts, and goes through all objects that are not frozen."""
    gc.unfreeze()
    before = len(gc.get_objects())
    with serving():
        wait_until(lambda: gc.get_freeze_count() > 0)
        assert len(gc.get_objects()) < before / 10


def test_a_server_whose_engine_is_lost_ends_so_that_another_can_start(
    lost_engine: DyingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tiny_settings()
    tokens = Tokens(ModelTokenizer.of(byte_tokenizer(512)), frozenset())
    server_app = create_app(settings, lost_engine, tokens, Tenancy(settings, time.time))
    server = Server(server_app, Caps.of(settings, descriptors=1024))
    with bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        wait_until(lambda: server.started)
        lost_engine.die.set()
        thread.join(START_TIMEOUT_S)
    assert not thread.is_alive()
    assert server.status == ENGINE_LOST
    assert "the engine is lost (out of memory): the server ends with status 4" in caplog.text


@pytest.fixture
def missed() -> Iterator[list[int]]:
    """Each SIGHUP that nobody else hears."""
    found: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGHUP, before)


def hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


def test_a_hangup_that_comes_too_early_is_kept_and_a_process_knows_that_it_ignores_them(missed: list[int]) -> None:
    taken: list[str] = []
    with Hangups.heard() as hangups:
        hang_up()
        hang_up()
        hangups.hand_to(lambda: taken.append("taken"))
        assert taken == ["taken"]
        hang_up()
        assert taken == ["taken", "taken"]
        assert not hangups.were_ignored
    assert missed == []
    hang_up()
    assert missed == [signal.SIGHUP]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    with Hangups.heard() as hangups:
        assert hangups.were_ignored
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.usefixtures("engine_in_a_thread")
def test_a_server_that_loads_is_not_ended(
    missed: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> NoReturn:
        hang_up()
        raise FieldOutOfRange("the model is loaded")

    monkeypatch.setattr(app.main, "load_app", load)
    assert main(["serve", "--model", "random:tiny-llama", "--port", "0", "--state-dir", "none"]) == 2
    assert missed == []
    assert capsys.readouterr().err.endswith("djinn: the model is loaded\n")


SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": [], "asgi": {"spec_version": "2.3"}}


class Connection:
    """One ASGI connection: what was sent, and a client that reads up to `stuck_after` and can leave."""

    def __init__(self, stuck_after: bytes | None = None) -> None:
        self.sending: list[bytes] = []
        self.gone = asyncio.Event()
        self.stuck_after = stuck_after

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sending.append(message.get("body", b""))
        if self.sending[-2:-1] == [self.stuck_after]:
            await asyncio.Event().wait()


async def events(closed: asyncio.Event, *parts: bytes, then_wait: bool = False) -> AsyncGenerator[bytes, None]:
    try:
        for part in parts:
            yield part
        if then_wait:
            await asyncio.Event().wait()
    finally:
        closed.set()


@pytest.mark.parametrize(
    ("stuck_after", "parts", "sending"),
    [
        (None, [b"one"], [b"", b"one", KEEP_ALIVE, KEEP_ALIVE]),  # nothing comes
        (b"one", [b"one", b"two", b"three"], [b"", b"one", b"two"]),  # the client does not read
        (b"one", [b"one"], [b"", b"one", b""]),  # nor the end, which no comment follows
    ],
)
async def test_a_quiet_stream_is_kept_alive_by_comments_until_its_client_leaves(
    stuck_after: bytes | None, parts: list[bytes], sending: list[bytes]
) -> None:
    connection, closed = Connection(stuck_after), asyncio.Event()
    stream = EventStream(events(closed, *parts, then_wait=stuck_after is None), keep_alive_s=0.02)
    running = asyncio.create_task(stream(SCOPE, connection.receive, connection.send))
    await asyncio.sleep(0.1)
    assert not running.done()
    assert connection.sending[: len(sending)] == sending
    assert connection.sending[len(sending) :].count(KEEP_ALIVE) == len(connection.sending) - len(sending)
    connection.gone.set()
    await asyncio.wait_for(running, 5)
    assert closed.is_set()
    assert (KEEP_ALIVE[:1], KEEP_ALIVE[-2:]) == (b":", b"\n\n")
