"""A server's port and its garbage, its end when the engine is lost, and SIGHUP while it loads."""

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import NoReturn

import pytest

import app.main
from app.cli import main
from app.domain.errors import FieldOutOfRange
from app.domain.values import ModelInfo
from app.web.connections import Caps
from app.web.server import ENGINE_LOST, Hangups, Loop, Server, bind
from tests.bridge.engines import DyingEngine, app_of
from tests.serving import START_TIMEOUT_S, tiny_settings
from tests.waiting import wait_until
from tests.web.connections.conftest import serving


@pytest.fixture
def lost_engine(info: ModelInfo) -> DyingEngine:
    """Dies when it is told to, and nobody starts another."""
    return DyingEngine(info)


def test_small_answers_are_not_held_back() -> None:
    """With Nagle's algorithm, headers and body in two writes cost 40 ms. asyncio ends it for sockets of this kind."""
    with bind("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP


def test_names_that_nobody_looks_up_leave_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(START_TIMEOUT_S))

    async def work() -> None:
        looked_up = [asyncio.ensure_future(asyncio.get_running_loop().getaddrinfo("h", 1)) for _ in range(64)]
        await asyncio.sleep(0)
        await asyncio.to_thread(answered.set)
        assert all(await asyncio.gather(*looked_up))

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(work())


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
    server = Server(app_of(lost_engine), Caps.of(tiny_settings(), descriptors=1024))
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
