"""Servers on threads of the tests that listen, log and end as `djinn serve` does. Only a process can be killed."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from app.flags import OneLineParser, add_flags, settings_of
from app.main import load_app
from app.web.connections import Caps
from app.web.server import Server, bind
from tests.processes import TINY
from tests.serving import START_TIMEOUT_S


class _Server(Server):
    """Says when it listens, and leaves the garbage collector alone."""

    def __init__(self, application: object, caps: Caps) -> None:
        super().__init__(application, caps)  # type: ignore[arg-type]
        self.listens = threading.Event()

    def _has_started(self, url: str) -> None:
        self.listens.set()


class _Log(logging.Handler):
    """The lines that one thread writes."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.addFilter(lambda record: record.thread == thread.ident)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _Told:
    """The lines of the servers that run, which need another level of the log than tests have otherwise."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("app")
        self._before = self._logger.level
        self._running = 0

    @contextmanager
    def to(self, handler: logging.Handler) -> Iterator[None]:
        """Tell the handler what is logged in a block. Blocks may end in any order."""
        if not self._running:
            self._before = self._logger.level
        self._running += 1
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(handler)
        try:
            yield
        finally:
            self._logger.removeHandler(handler)
            self._running -= 1
            if not self._running:
                self._logger.setLevel(self._before)


TOLD = _Told()


class ServerThread:
    """A running server with the flags of `djinn serve`, and those of a tiny model. Its engine has a thread too."""

    def __init__(self, folder: Path, *flags: str) -> None:
        parser = OneLineParser()
        add_flags(parser)
        settings = settings_of(parser.parse_args([*TINY, "--state-dir", str(folder), *flags]))
        self._bound = bind(settings.host, settings.port)
        self.url = f"http://127.0.0.1:{self._bound.getsockname()[1]}"
        try:
            self._server = _Server(load_app(settings), Caps.of(settings, descriptors=4096))
        except BaseException:
            self._bound.close()
            raise
        self._thread = threading.Thread(target=self._server.run, args=([self._bound],), name="orderly-server")
        self._log = _Log(self._thread)

    @property
    def log(self) -> str:
        """What its event loop has logged."""
        return "\n".join(self._log.lines)

    def tell(self, signal_number: signal.Signals = signal.SIGTERM) -> None:
        """What the signal does: the server begins to end. Ctrl-C ends all servers of a terminal: nothing leaves."""
        self._server.handle_exit(signal_number, None)

    def exit_status(self, timeout_s: float) -> int | None:
        """Wait for the end; None if it has not come."""
        self._thread.join(timeout_s)
        return None if self._thread.is_alive() else self._server.status

    @contextmanager
    def running(self) -> Iterator[ServerThread]:
        """Serve in a block."""
        with TOLD.to(self._log), self._bound:
            self._thread.start()
            try:
                if not self._server.listens.wait(START_TIMEOUT_S):
                    raise RuntimeError("the server did not start")
                yield self
            finally:
                self.tell(signal.SIGINT)
                ended = self.exit_status(START_TIMEOUT_S)
        assert ended is not None, "the server did not stop"


@contextmanager
def serve_thread(folder: Path, *flags: str) -> Iterator[tuple[ServerThread, httpx.Client]]:
    """A server that keeps its sessions in `folder`, and a client of it."""
    with ExitStack() as ends:
        server = ends.enter_context(ServerThread(folder, *flags).running())
        yield server, ends.enter_context(httpx.Client(base_url=server.url, timeout=60))
