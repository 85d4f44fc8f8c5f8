"""`djinn serve`: from settings to a server that runs until it is told to end."""

from __future__ import annotations

import gc
import logging
import os
import select
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from app.domain.errors import EngineError
from app.logs.formats import Log, configure
from app.machine.descriptors import raise_descriptor_limit
from app.settings import Settings
from app.web.hangups import Hangups
from app.web.port import bind

if TYPE_CHECKING:
    from app.engine_process.engine import EngineProcess

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the engine of a server that stands by."""
SPIN_COUNT = "4000"
"""How long PyTorch's OpenMP threads spin at the end of an operator, read when PyTorch is loaded. By default they
spin for milliseconds, which is no faster on an idle machine and ruinous as soon as anything else wants a core."""


def serve(settings: Settings, *, stands_by: bool = False) -> int:
    """Load the model and serve it. Returns with what the process should end. Raises `DjinnError`.

    One that `stands_by` imports everything, then waits for a line of standard input before it takes its port and its
    state folder. If the input ends instead, the process ends. It ends too if its engine's process dies.
    """
    settings.require_safe_access()
    with Hangups.heard() as hangups:
        return _serve_until_told(settings, hangups, stands_by)


def _serve_until_told(settings: Settings, hangups: Hangups, stands_by: bool) -> int:
    configure(Log(logging.INFO, settings.log_format, settings.replica))
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    descriptors = raise_descriptor_limit()
    with ExitStack() as held:
        bound = None if stands_by else held.enter_context(bind(settings.host, settings.port))
        # Imports take seconds: --help and a wrong flag need not wait for them.
        with _no_garbage_collected():
            from app.engine_process.engine import EngineProcess

            # It imports PyTorch meanwhile.
            process = EngineProcess(settings.engine_timeout_s, stuck_s=settings.engine_stuck_s)
            from app.main import load_app, prepare
            from app.web.connections.caps import Caps
            from app.web.server import ENGINE_LOST, Server

            if bound is None:
                prepare(settings, process)
                logger.info("%s stands by: it waits for a line of standard input", settings.replica or "the server")
                if (status := _wait_until_wanted(process)) is not None:
                    return status
                bound = held.enter_context(bind(settings.host, settings.port))
            try:
                application = load_app(settings, process)
            except EngineError as error:
                if not stands_by:
                    raise
                # It died as it was wanted. No setting is wrong: another process can have another engine.
                logger.critical("%s", error)
                return ENGINE_LOST
        server = Server(application, Caps.of(settings, descriptors), hangups)
        server.run([bound])
    return server.status


def _wait_until_wanted(process: EngineProcess) -> int | None:
    """Wait for a line of standard input. With what this process should end if none comes: the input has ended, or the
    engine's process has, which nobody is served without.
    """
    from app.web.server import ENDED, ENGINE_LOST

    while process.is_running:
        if sys.stdin is None or select.select([sys.stdin], [], [], LOOK_S)[0]:
            if sys.stdin is not None and sys.stdin.buffer.readline():
                return None
            process.close()
            return ENDED
    process.close()
    return ENGINE_LOST


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Within this context, which makes a million objects and hardly any garbage, Python looks for none. It would take a
    fifth of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
