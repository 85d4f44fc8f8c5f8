"""uvicorn with limits for connections and an orderly end. Connections are taken here: asyncio's own way has no caps,
and logs a traceback for each one that it cannot take.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Self

import uvicorn
from fastapi import FastAPI

from app.domain.errors import FieldOutOfRange, TooManyConnections
from app.domain.tasks import Tasks
from app.engine_process.engine import END_TIMEOUT_S, STOP_TIMEOUT_S
from app.journal.journal import CLOSE_S as JOURNAL_S
from app.sessions.lifecycle import KEEP_S, LATE_S, Evacuate, drain
from app.telemetry.metrics import ConnectionMetrics, Refused
from app.telemetry.turn_metrics import CLOSE_S as TRACES_S
from app.web.connections import ONCE_PER_MINUTE, Caps, Connection, ConnectionTable, Lingering, origin_of
from app.web.protocol import HttpProtocol, WebSocketProtocol, last_answer, watch

logger = logging.getLogger(__name__)

logger.addFilter(ONCE_PER_MINUTE)

AT_ONCE = 64
"""Connections that are taken before anything else gets its turn."""
PAUSE_S = 0.1
"""Until the next try, when the system could give none."""
UNSENT_BYTES = 256 << 10
"""Of an answer that a client reads slowly, the kernel keeps no more than this, instead of some MB for each connection.
It is then soon clear whether a client reads slowly, or nothing.
"""
RETRY_AFTER_S = 1


class Loop(asyncio.SelectorEventLoop):
    """Resolves host names on its own threads, so that a silent name server does not block the threads of other work."""

    def __init__(self) -> None:
        super().__init__()
        self._resolver = ThreadPoolExecutor(4, "djinn-resolver")

    async def getaddrinfo(self, host: Any, port: Any, **how: Any) -> list[Any]:
        """As `socket` has it."""
        return await self.run_in_executor(self._resolver, partial(socket.getaddrinfo, host, port, **how))

    def close(self) -> None:
        """Cancel queued lookups, and do not wait for those that run."""
        self._resolver.shutdown(wait=False, cancel_futures=True)
        super().close()


class AcceptedSocket(socket.socket):
    """A connection's socket, which tells when it is to be closed. Its protocol cannot: a WebSocket gets another one."""

    on_close: Callable[[socket.socket], None]

    def close(self) -> None:
        """Hand it over to be closed."""
        if self.fileno() >= 0:
            self.on_close(socket.socket(self.family, self.type, self.proto, fileno=self.detach()))


@dataclass(eq=False)
class Listener:
    """Takes the connections of one bound socket, within the caps of `table`, from `start` to `close`."""

    _bound: socket.socket
    _table: ConnectionTable
    _metrics: ConnectionMetrics
    _make_protocol: Callable[[Connection], asyncio.Protocol]
    _opening: Tasks = field(default_factory=Tasks)
    _lingering: Lingering = field(default_factory=Lingering)
    _retry: asyncio.TimerHandle | None = None

    def start(self, backlog: int) -> None:
        """Listen. Call on the running event loop."""
        self._bound.setblocking(False)
        self._bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)  # connections inherit it
        self._bound.listen(backlog)
        self._watch()

    def close(self) -> None:
        """Take no more; those that are open stay."""
        if self._retry is not None:
            self._retry.cancel()
        asyncio.get_running_loop().remove_reader(self._bound)
        self._lingering.close()

    def _watch(self) -> None:
        self._retry = None
        asyncio.get_running_loop().add_reader(self._bound, self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, peer = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._take(accepted, peer[0])

    def _pause(self, error: OSError) -> None:
        """The system keeps saying that a connection is there: to try at once again would take all of a core."""
        logger.warning("connections cannot be taken: %s; they wait", error.strerror)
        self._metrics.refused.labels(Refused.SYSTEM).inc()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._bound)
        self._retry = loop.call_later(PAUSE_S, self._watch)

    def _take(self, accepted: socket.socket, peer: str) -> None:
        origin = origin_of(peer)
        if (cause := self._table.make_room(origin, asyncio.get_running_loop().time())) is not None:
            self._refuse(accepted, peer, cause)
            return
        connection = self._table.open(origin)
        own = AcceptedSocket(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        own.on_close = lambda ended: self._close(connection, ended)
        self._opening.start(self._open(own, connection))

    async def _open(self, accepted: AcceptedSocket, connection: Connection) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: self._make_protocol(connection), accepted)
        except OSError:  # the client has gone already
            accepted.close()

    def _refuse(self, accepted: socket.socket, peer: str, cause: Refused) -> None:
        self._metrics.refused.labels(cause).inc()
        caps = self._table.caps
        if cause is Refused.TOTAL:
            error = TooManyConnections(f"{caps.total} connections are open, each with a request: try again")
            logger.warning("connections are refused: %d are open, each with a request", caps.total)
        else:
            most = caps.of_origin(origin_of(peer))
            error = TooManyConnections(f"this address has {most} connections open, each with a request: try again")
            logger.warning("connections from %s are refused: it has %d open, each with a request", peer, most)
        accepted.setblocking(False)
        with suppress(OSError):
            accepted.send(last_answer(error, f"retry-after: {RETRY_AFTER_S}"))
        self._lingering.take(accepted)

    def _close(self, connection: Connection, ended: socket.socket) -> None:
        """The connection counts no more, even if its client has a moment to read the answer."""
        self._table.close(connection)
        if connection.lingers:
            self._lingering.take(ended)
        else:
            ended.close()


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port but does not listen yet. Raises `FieldOutOfRange` if the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, an answer of two writes waits
    # 40 ms for the client's delayed acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        # Other sockets that may reuse the address could bind it too until this one listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        bound.close()
        setting = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        raise FieldOutOfRange(
            f"cannot listen on {host}, port {port}: {error.strerror}; choose another with --{setting}", param=setting
        ) from error
    return bound


ANSWERS_S = 5
"""How long responses of turns that were cancelled at the end may take to reach their clients."""


def longest_end_s(drain_timeout_s: float) -> float:
    """The seconds from SIGTERM to the end of the process, if each step takes all the time that it has."""
    kv = KEEP_S + LATE_S  # turns that do not end when they are cancelled have this time too
    engine = STOP_TIMEOUT_S + END_TIMEOUT_S
    return drain_timeout_s + kv + ANSWERS_S + engine + JOURNAL_S + TRACES_S


ECHO_S = 0.5
"""Linux tells a process of its parent's end, where it has asked for SIGTERM then, once for each thread of the parent
(prctl(2), PR_SET_PDEATHSIG). What comes so soon after the first is no second signal.
"""
LOOK_S = 0.01
"""Between looks at what is open yet at the end. uvicorn would wait a tenth of a second at least."""
KEEP_ALIVE_TIMEOUT_S = 75
"""Agents come back after a tool has run: uvicorn's 5 s would close their pooled connections under them."""


async def close_connections(server: uvicorn.Server) -> None:
    """Close those that are idle, and the others with the ends of their answers, or when these have had their time."""
    state, timeout_s = server.server_state, server.config.timeout_graceful_shutdown
    for connection in list(state.connections):
        connection.shutdown()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while (state.connections or state.tasks) and not server.force_exit:
        if deadline is not None and time.monotonic() > deadline:
            logger.error("requests that are cut off, as they had %d s at the end: %d", timeout_s, len(state.tasks))
            for task in state.tasks:
                task.cancel()
            return
        await asyncio.sleep(LOOK_S)


def url_of(bound: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


class Hangups:
    """Keeps SIGHUP until the server can take it: a server that loads its model has nothing yet that could hear it."""

    def __init__(self) -> None:
        self.were_ignored = False
        """Whether the process was started to hear none: `nohup` asks for that."""
        self._take: Callable[[], None] | None = None
        self._is_kept = False

    @classmethod
    @contextmanager
    def heard(cls) -> Iterator[Self]:
        """In the block SIGHUP ends the process no more. Call on the main thread."""
        hangups = cls()
        before = signal.signal(signal.SIGHUP, hangups._hear)
        hangups.were_ignored = before is signal.SIG_IGN
        try:
            yield hangups
        finally:
            signal.signal(signal.SIGHUP, before)

    def hand_to(self, take: Callable[[], None]) -> None:
        """Have `take` called for each from now on, and for all that have come before once. It runs between any two
        steps of the main thread.
        """
        self._take = take
        if self._is_kept:
            self._is_kept = False
            take()

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        if self._take is None:
            self._is_kept = True
        else:
            self._take()


ENDED, ENGINE_LOST, NOT_DURABLE, FENCED = 0, 4, 5, 6
"""Exit statuses: the server was told to end; its engine has failed for good; the journal lacks changes; another server
has the state folder.
"""


class Server(uvicorn.Server):
    """Serves `app` on bound sockets, within the caps and deadlines of its settings; prints one line to stdout when it
    takes requests. The first socket is its own; others may be shared with processes that take connections of them too.
    """

    def __init__(self, app: FastAPI, caps: Caps, hangups: Hangups | None = None) -> None:
        """`hangups` are heard from its start on; None: as if there were none."""
        services = self._services = app.state.services
        super().__init__(
            uvicorn.Config(
                app,
                loop=f"{__name__}:{Loop.__name__}",
                log_config=None,  # its lines have the form of all others
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
                timeout_graceful_shutdown=ANSWERS_S,
                ws=WebSocketProtocol,
                ws_max_size=int(services.settings.max_request_bytes),
                # A message of 8 kB would come to one of 8 MiB.
                ws_per_message_deflate=False,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(ONCE_PER_MINUTE)
        self._hangups = hangups
        self._metrics: ConnectionMetrics = services.metrics.connections
        self.table = ConnectionTable(caps, self._metrics)
        self._listeners: list[Listener] = []
        self._watching: asyncio.Task[None] | None = None
        self._told_at = 0.0
        """When a first signal came."""
        self._interrupted = False
        self.status = ENDED
        """With what the process should end, once it has."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen on `sockets`."""
        assert sockets is not None
        await super().startup([])
        if self.started:
            self.started = False  # until clients can connect
            for bound in sockets:
                # Connections inherit it: without it those of a server that was killed keep the port for a minute.
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener = Listener(bound, self.table, self._metrics, self.speak)
                listener.start(self.config.backlog)
                self._listeners.append(listener)
            self._watching = asyncio.create_task(watch(self.table, self._services.settings, self._metrics))
            self.started = True
            self._has_started(url_of(sockets[0]))

    def _has_started(self, url: str) -> None:
        """Say so, and hear hangups."""
        # A full collection goes through each object and stops every turn meanwhile: 0.3 s with those of the
        # modules and the model, which are never garbage.
        gc.collect()
        gc.freeze()
        self._hear_hangups()
        if not self.should_exit:  # a terminal that has closed takes no line
            print(f"Djinn serves {self._services.info.name} on {url}", flush=True)

    def _hear_hangups(self) -> None:
        """Reload files at each SIGHUP; without files end at the first. A replica never ends: who keeps it
        passes its own SIGHUP on.
        """
        if self._hangups is None:
            return
        has_files = self._services.tenancy.has_files
        if has_files or self._services.settings.replica is not None:
            self._hangups.hand_to(partial(self._reload_on, asyncio.get_running_loop()))
        elif not self._hangups.were_ignored:
            self._hangups.hand_to(self._begin_to_end)

    def _reload_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._services.tenancy.reload)

    def _begin_to_end(self) -> None:
        # A terminal that closes may say so twice: by its shell, and by the kernel. Neither is in a hurry.
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second. Whether to end: only another process can have another engine, or the folder again."""
        self._end_if_fenced()
        executor = self._services.sessions.executor
        if executor.is_lost and not self.should_exit:
            self.should_exit, self.status = True, ENGINE_LOST
            text = "the engine is lost (%s): the server ends with status %d, so that another is started"
            logger.critical(text, executor.failure, self.status)
        return await super().on_tick(counter)

    def _end_if_fenced(self) -> None:
        lease, cluster = self._services.lease, self._services.cluster
        lost = {
            "the state folder": lease is not None and lease.is_lost,
            "the name in the cluster": cluster is not None and cluster.membership.is_lost,
        }
        for what, is_lost in lost.items():
            if is_lost and not self.force_exit:
                self.status = FENCED
                logger.critical("%s is another server's: this one ends at once with status %d", what, self.status)
                self.end_at_once()

    def speak(self, connection: Connection) -> HttpProtocol:
        """The protocol of a new connection."""
        return HttpProtocol(
            connection, self.table, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close. While it drains the port still answers, so that `/ready` can say 503."""
        cluster, settings = self._services.cluster, self._services.settings
        timeout_s, began = settings.drain_timeout_s, time.monotonic()
        logger.info(
            "drain: new sessions and turns are refused; over within %g s; a second signal ends the server at once",
            longest_end_s(timeout_s),
        )
        # They stay if the settings say so, or if all servers have been ended.
        stay = cluster is None or settings.drain_to != "peers" or self._interrupted or self.status is not ENDED
        evacuate: Evacuate | None = None if cluster is None or stay else cluster.draining.run
        self._services.history.mark("draining")
        draining = asyncio.create_task(drain(self._services.sessions, timeout_s, evacuate))
        while not draining.done() and not self.force_exit:
            await asyncio.wait({draining}, timeout=0.1)
            self._end_if_fenced()
        draining.cancel()
        self._services.history.mark("drained")
        while self._listeners:  # those that are open stay
            self._listeners.pop().close()
        if cluster is not None:  # answers of others pass here as long as turns here could run
            while cluster.hops.passing_on and not self.force_exit and time.monotonic() < began + timeout_s:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        if not self.force_exit:
            logger.info("drain: the port is closed; answers under way have %d s", ANSWERS_S)
        for bound in sockets or ():
            bound.close()
        await close_connections(self)
        if not self.force_exit:
            await self.lifespan.shutdown()
        if self._watching is not None:
            self._watching.cancel()
        if not self.force_exit:
            waiting = self._services.sessions.keeper.state.waiting
            level = logging.ERROR if waiting else logging.INFO
            logger.log(level, "drain: over; changes that the journal lacks: %d", waiting)
            self.status = NOT_DURABLE if waiting else self.status

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, leave at the second. Unlike uvicorn's own, the process has an exit status. Ctrl-C
        reaches all servers of a terminal: no server is left for sessions to go to.
        """
        self._interrupted = self._interrupted or sig == signal.SIGINT
        now = time.monotonic()
        if not self.should_exit:
            self._told_at = now
        elif sig != signal.SIGTERM or now - self._told_at >= ECHO_S:
            self.end_at_once()
        self.should_exit = True

    def end_at_once(self) -> None:
        """Leave, whatever is under way."""
        self.should_exit = self.force_exit = True
        # Every request that ends here would be a traceback.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
