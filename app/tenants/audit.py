"""The audit log: a line of JSON for each request, without anything that the request said."""

import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from app.domain.errors import FieldOutOfRange
from app.logs.about import method_of, route_of, session_of
from app.web.matching import matched
from app.web.middleware.answers import Answer

logger = logging.getLogger(__name__)

LOOKOUT = b"front"
"""The `User-Agent` of looks at a replica."""
KEYS = frozenset({b"authorization", b"x-api-key"})
"""Headers that a client's key is in."""


class AuditLog:
    """A file that lines are appended to. Each is written before the next request is looked at."""

    def __init__(self, path: Path) -> None:
        """Raises `FieldOutOfRange` if the file cannot be opened."""
        self._path = path
        try:
            self._file = self._open()
        except OSError as error:
            raise FieldOutOfRange(f"audit_log {path}: {error.strerror}", param="audit_log") from error

    def write(self, line: dict[str, Any]) -> None:
        """Append a line. If that fails, the server goes on, and its own log says so."""
        try:
            written = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
            if self._file.write(written) != len(written):
                raise OSError("only a part of it was written")
        except (OSError, ValueError) as error:  # ValueError: the server has ended, and the file is closed
            logger.error("a line of the audit log %s is lost: %s", self._path, error)

    def reopen(self) -> None:
        """Go on in a new file of that name: the old one has been moved away. Keeps the old one if that fails."""
        try:
            new = self._open()
        except OSError as error:
            logger.error("the audit log %s cannot be reopened, the old file stays: %s", self._path, error.strerror)
            return
        self.close()
        self._file = new

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _open(self) -> FileIO:
        return FileIO(self._path, "a", opener=lambda path, flags: os.open(path, flags, 0o600))


class AuditMiddleware:
    """Writes a line when a request is over: a stream's when it has ended, a WebSocket's when it has closed.

    The looks of a front door and of other replicas leave no line: they come each second. Only `User-Agent` says what
    they are, so a client can look like one. It then learns what everybody may: whether the server is ready. With a key
    it would also learn about the key, so that leaves a line.
    """

    def __init__(self, app: ASGIApp, log: AuditLog, clock: Callable[[], float]) -> None:
        self.app = app
        self._log = log
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan" or _is_look(scope):
            await self.app(scope, receive, send)
            return
        began, answer = self._clock(), Answer()
        try:
            await self.app(scope, receive, answer.watched(send))
        finally:
            self._log.write(_line(scope, began, answer))


def _is_look(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != "/ready":
        return False
    headers = dict(scope["headers"])
    return headers.get(b"user-agent") == LOOKOUT and headers.keys().isdisjoint(KEYS)


def _line(scope: Scope, began: float, answer: Answer) -> dict[str, Any]:
    """What is written of one request."""
    state, about = scope["state"], matched(scope)
    return {
        "time": datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds"),
        "tenant": state.get("owner"),
        "request_id": state["request_id"],
        "method": method_of(scope),
        "path": route_of(about),
        "session": session_of(about, answer.session),
        "status": answer.status,
    }
