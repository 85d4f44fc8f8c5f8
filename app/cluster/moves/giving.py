"""Connections that the engine takes over."""

from __future__ import annotations

import socket

from app.bridge.executor import EngineExecutor


def give(executor: EngineExecutor, connection: socket.socket) -> int:
    """Give the engine the connection; returns its number. Raises `EngineError`, `EngineRestarting`, `OSError`; then it
    is closed.
    """
    try:
        executor.check()
        return executor.engine.give(connection)
    except BaseException:
        connection.close()
        raise
