"""uvicorn with limits for connections and an orderly end: on SIGTERM new work is refused, and running turns may finish
before the port closes.
"""

import asyncio
import gc
import logging
import signal
import socket
from functools import partial
from types import FrameType

from fastapi import FastAPI

from app.sessions.lifecycle import Evacuate, drain
from app.web.connections.caps import Caps
from app.web.ending import ANSWERS_S, longest_end_s
from app.web.hangups import Hangups
from app.web.listening import ListeningServer

logger = logging.getLogger(__name__)

ENDED, ENGINE_LOST, NOT_DURABLE, FENCED = 0, 4, 5, 6
"""Exit statuses: the server was told to end; its engine has failed for good; the journal lacks changes; another server
has the state folder.
"""


class Server(ListeningServer):
    """Serves `app`; prints one line to stdout when it takes requests."""

    def __init__(self, app: FastAPI, caps: Caps, hangups: Hangups | None = None) -> None:
        """`hangups` are heard from its start on; None: as if there were none."""
        services = app.state.services
        super().__init__(app, services.settings, services.metrics.connections, caps)
        self._services = services
        self._hangups = hangups
        self._interrupted = False
        self.status = ENDED
        """With what the process should end, once it has."""

    def has_started(self, url: str) -> None:
        """Say so, and hear hangups."""
        # A full collection goes through each object and stops every turn meanwhile: 0.3 s with those of the
        # modules and the model, which are never garbage.
        gc.collect()
        gc.freeze()
        self._hear_hangups()
        if not self.should_exit:  # a terminal that has closed takes no line
            print(f"Djinn serves {self._services.info.name} on {url}", flush=True)

    def _hear_hangups(self) -> None:
        """Read files again at each, where there are any; else end at the first. A replica goes on all the same: its
        front door passes on what it hears.
        """
        if self._hangups is None:
            return
        has_files = self._services.tenancy.has_files or self._services.cluster is not None
        if has_files or self._services.settings.replica is not None:
            self._hangups.hand_to(partial(self._reload_on, asyncio.get_running_loop()))
        elif not self._hangups.were_ignored:
            self._hangups.hand_to(self._begin_to_end)

    def _reload_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._services.tenancy.reload)
            if self._services.cluster is not None:
                loop.call_soon_threadsafe(self._services.cluster.reload)

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
        lease = self._services.lease
        if lease is not None and lease.is_lost and not self.force_exit:
            self.status = FENCED
            logger.critical("the state folder is another server's: this one ends at once with status %d", self.status)
            self.end_at_once()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close. While it drains the port still answers, so that `/ready` can say 503."""
        timeout_s = self._services.settings.drain_timeout_s
        logger.info(
            "drain: new sessions and turns are refused; over within %g s; a second signal ends the server at once",
            longest_end_s(timeout_s),
        )
        draining = asyncio.create_task(drain(self._services.sessions, timeout_s, self._evacuate))
        while not draining.done() and not self.force_exit:
            await asyncio.wait({draining}, timeout=0.1)
            self._end_if_fenced()
        draining.cancel()
        self.close_port()
        if not self.force_exit:
            logger.info("drain: the port is closed; answers under way have %d s", ANSWERS_S)
        await super().shutdown(sockets)
        if not self.force_exit:
            self._log_end()

    @property
    def _evacuate(self) -> Evacuate | None:
        """What brings sessions to other servers; None: they stay, as the settings say, or who has ended all servers."""
        services, stays = self._services, self._interrupted or self.status is not ENDED
        if services.cluster is None or services.settings.drain_to != "peers" or stays:
            return None
        evacuate: Evacuate = services.cluster.draining.run
        return evacuate

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end. Ctrl-C reaches all servers of a terminal: no server is left for sessions to go to."""
        self._interrupted = self._interrupted or sig == signal.SIGINT
        super().handle_exit(sig, frame)

    def _log_end(self) -> None:
        waiting = self._services.sessions.keeper.state.waiting
        level = logging.ERROR if waiting else logging.INFO
        logger.log(level, "drain: over; changes that the journal lacks: %d", waiting)
        if waiting:
            self.status = NOT_DURABLE
