"""The engine's process: it loads a model, and carries frames between the engine and the server."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, get_args

from app.domain.errors import Busy, DjinnError, EngineError
from app.engine_process.channel import Channel, Closed
from app.engine_process.frames import (
    Beat,
    Compile,
    Compiled,
    Dying,
    Load,
    Loaded,
    Prepare,
    Release,
    Stop,
    decode,
    encode,
    encode_events,
)
from app.logs import configure
from app.machine.cores import free_from_core, leave_core
from app.machine.handover import receive_sockets
from app.machine.memory import give_back_freed
from app.messages import Command, Done, Event, Failed, Ticketed

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from app.gpu.engine import Engine
    from app.grammars.matcher import Matcher


BEAT_S = 1.0
FLUSH_S = 5.0
"""How long the last frames may take."""
FAILED, ORPHANED = 1, 3
"""Exit statuses: the engine has failed; the server is gone."""


def serve(channel: Channel, sockets: socket.socket) -> int:
    """Load the model that the first frame names, and run its engine until `Stop`. Returns the exit status.

    Connections to other servers come by `sockets`.
    """
    threading.Thread(target=_end_with_server, args=(channel,), name="djinn-orphan", daemon=True).start()
    gc.disable()  # a million objects are made until the engine runs, and hardly any garbage
    began = time.perf_counter()
    from app.gpu.startup.loader import load_engine  # imports PyTorch, while the server looks for the model

    leave_core()  # of the thread that imports PyTorch, which all others come from
    seconds = time.perf_counter() - began
    load = _first(channel)
    configure(load.log)
    os.environ["DJINN_CACHE_DIR"] = load.cache_dir  # compiled kernels are kept there too
    logger.info("imported PyTorch and the engine in %.1f s", seconds)

    def die(reason: str) -> None:
        channel.send(encode(Dying(reason)))
        channel.drain(FLUSH_S)
        os._exit(FAILED)

    try:
        engine = load_engine(load.find_model(), load.engine, load.disk_room(), die)
    except DjinnError as error:
        channel.send(encode(Loaded(None, error)))
        channel.drain(FLUSH_S)
        return FAILED
    host = _Host(channel, sockets, engine)
    gc.enable()
    gc.collect()
    give_back_freed()
    gc.freeze()
    host.start()
    try:
        engine.run(host.deliver)
    except Exception as error:
        logger.exception("the engine has failed")
        channel.send(encode(Dying(f"{type(error).__name__}: {error}")))
        return FAILED
    finally:
        channel.drain(FLUSH_S)
    return 0


def _end_with_server(channel: Channel) -> None:
    """End the process when the server is gone, whatever it is doing."""
    channel.wait_until_closed()
    os._exit(ORPHANED)


def _first(channel: Channel) -> Load:
    while True:
        data = channel.receive(BEAT_S)
        match None if data is None else decode(data):
            case None:
                pass
            case Load(only_find=True) as load:
                configure(load.log)
                with contextlib.suppress(DjinnError):  # the next one reports it
                    load.find_model()
                gc.collect()
                gc.freeze()
            case Load() as load:
                return load
            case frame:
                raise EngineError(f"unexpected frame before the model is loaded: {type(frame).__name__}")


class _Host:
    """The threads around a running engine."""

    def __init__(self, channel: Channel, sockets: socket.socket, engine: Engine) -> None:
        self._channel = channel
        self._sockets = sockets
        self._engine = engine
        self._grammars: dict[int, Future[Matcher]] = {}
        """Those that the server waits for or holds."""

    def start(self) -> None:
        """Say that the engine takes commands, and take them."""
        self._channel.send(encode(Loaded(self._engine.info)))
        for work in (self._receive, self._receive_sockets, self._beat):
            threading.Thread(target=work, name="djinn-host", daemon=True).start()

    def deliver(self, events: Sequence[Event]) -> None:
        """Send the events of a step. What is slow to make is made on a thread of its own."""
        slow = [event for event in events if isinstance(event, Done) and callable(event.value)]
        for event in slow:
            threading.Thread(target=self._send_late, args=(event,), name="djinn-answer", daemon=True).start()
        self._send([event for event in events if event not in slow] if slow else events)

    def _send_late(self, event: Event) -> None:
        free_from_core()
        self._send([event])

    def _send(self, events: Sequence[Event]) -> None:
        try:
            data = encode_events(events)
        except Exception as error:
            logger.exception("events could not be sent")
            if len(events) > 1:
                for event in events:
                    self._send([event])
                return
            tickets = [event.ticket for event in events if isinstance(event, Ticketed)]
            if not tickets:
                raise
            data = encode_events([Failed(tickets[0], EngineError(f"the answer could not be sent: {error}"))])
        self._channel.send(*data)

    def _receive(self) -> None:
        try:
            while True:
                data = self._channel.receive(BEAT_S)
                if data is not None and not self._take(data):
                    return
                del data  # may be much memory
        except Closed:
            os._exit(ORPHANED)
        except Exception:
            logger.exception("a frame of the server could not be read")
            os._exit(FAILED)

    def _receive_sockets(self) -> None:
        with contextlib.suppress(OSError):  # `_receive` tells of the end
            receive_sockets(self._sockets, self._engine.connections)

    def _take(self, data: bytes | memoryview) -> bool:
        """Whether more frames may follow."""
        match decode(data):
            case Stop():
                self._engine.stop()
                return False
            case Compile() as compile:
                self._compile(compile)
            case Release(number):
                held = self._grammars.pop(number, None)
                if held is not None:  # an engine before this one may have had it
                    held.cancel()
            case Prepare():
                self._engine.grammars.prepare()
            case command:
                assert isinstance(command, get_args(Command))
                self._engine.send(command)
        return True

    def _compile(self, frame: Compile) -> None:
        try:
            compiling = self._engine.grammars.compile(frame.grammar)
        except Busy as error:
            compiling = Future()
            compiling.set_exception(error)
        self._grammars[frame.number] = compiling
        compiling.add_done_callback(lambda done: self._tell_compiled(frame.number, done))

    def _tell_compiled(self, number: int, compiling: Future[Matcher]) -> None:
        if compiling.cancelled():
            return
        error = compiling.exception()
        if error is not None and not isinstance(error, DjinnError):
            logger.error("a grammar could not be compiled", exc_info=error)
            error = EngineError(f"the grammar could not be compiled: {error}")
        self._channel.send(encode(Compiled(number, error)))

    def _beat(self) -> None:
        progress, seen, busy_s = self._engine.progress, -1, 0.0
        while True:
            time.sleep(BEAT_S)
            # By beats, not by a clock: it goes on while both processes are suspended.
            busy_s = 0.0 if progress.is_idle or progress.count != seen else busy_s + BEAT_S
            seen = progress.count
            self._channel.send(encode(Beat(busy_s)))
