"""Connections that the engine takes over."""

from __future__ import annotations

import socket

from app.domain.errors import EngineRestarting
from app.engine_process.executor import EngineExecutor


def give(executor: EngineExecutor, connection: socket.socket) -> int:
    """Give the engine the connection; returns its number. Raises `EngineError`, `EngineRestarting`, and closes it."""
    try:
        executor.check()
        return executor.engine.give(connection)
    except OSError as error:  # it is about to be known that the engine has died
        connection.close()
        raise EngineRestarting(f"a connection could not be handed to it: {error}") from error
    except BaseException:
        connection.close()
        raise
