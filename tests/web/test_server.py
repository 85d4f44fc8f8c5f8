from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from app.domain.errors import FieldOutOfRange
from app.domain.values import ModelInfo
from app.main import create_app, load_app
from app.model_store.byte_tokenizer import byte_tokenizer
from app.model_store.model_tokenizer import ModelTokenizer
from app.tenants.tenancy import Tenancy
from app.text.tokenizer import Tokens
from app.web.connections.caps import Caps
from app.web.port import bind
from app.web.server import ENGINE_LOST, Server
from tests.bridge.test_executor import DyingEngine, info
from tests.processes import serve_process
from tests.serving import START_TIMEOUT_S, tiny_settings

__all__ = ["info"]


@pytest.fixture
def lost_engine(info: ModelInfo) -> DyingEngine:
    """Dies when it is told to, and nobody starts another."""
    return DyingEngine(info)


def until_started(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.005)


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


def test_a_server_that_was_killed_under_a_client_comes_back_on_its_port(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state") as server, httpx.Client(base_url=server.url) as http:
        http.get("/health").raise_for_status()
        server.kill()
        with serve_process(tmp_path / "state", "--port", server.url.rpartition(":")[2]) as again:
            assert again.url == server.url
            assert httpx.get(f"{again.url}/health").status_code == 200


def test_a_full_collection_of_garbage_passes_over_what_the_server_started_with() -> None:
    """It stops every turn as long as it lasts, and goes through all objects that are not frozen."""
    gc.unfreeze()
    settings = tiny_settings()
    server = Server(load_app(settings), Caps.of(settings, descriptors=1024))
    with bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, args=([bound],))
        before = len(gc.get_objects())
        thread.start()
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not gc.get_freeze_count() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(gc.get_objects()) < before / 10
        finally:
            server.should_exit = True
            thread.join(START_TIMEOUT_S)
    assert not thread.is_alive()


def test_a_server_whose_engine_is_lost_ends_so_that_another_can_start(
    lost_engine: DyingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tiny_settings()
    tokens = Tokens(ModelTokenizer.of(byte_tokenizer(512)), frozenset())
    app = create_app(settings, lost_engine, tokens, Tenancy(settings, time.time))
    server = Server(app, Caps.of(settings, descriptors=1024))
    with bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        until_started(server)
        lost_engine.die.set()
        thread.join(START_TIMEOUT_S)
    assert not thread.is_alive()
    assert server.status == ENGINE_LOST
    said = [line.getMessage() for line in caplog.records if line.name == "app.web.server"]
    assert said[0] == "the engine is lost (out of memory): the server ends with status 4, so that another is started"
