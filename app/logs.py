"""Lines of the log: their form, the request that each is about, and errors that nothing has caught."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO
from weakref import WeakValueDictionary

import orjson

logger = logging.getLogger(__name__)

SESSION_ID = re.compile(r"ses_(?:[a-z][a-z0-9]{0,15}_)?[0-9a-f]{36}")
"""Anything else in its place may be a text of the caller's."""


class Named(Protocol):
    """A session."""

    @property
    def log_name(self) -> str:
        """What the log may call it; empty: it has no name, or a tenant's."""


NAMED: WeakValueDictionary[str, Named] = WeakValueDictionary()
"""Sessions that are open, by id."""
MOST_OF_A_NAME = 80
"""Characters of a name in a line."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
"""HTTP allows any word as a method, so another one may be a text of the caller's too."""

REQUEST: ContextVar[Mapping[str, Any] | None] = ContextVar("REQUEST", default=None)
"""The ASGI scope of the request that this task works for. What the routes find out later is in it too."""


def request_id() -> str | None:
    """That of the task's request; None if it works for none."""
    scope = REQUEST.get()
    return None if scope is None else scope.get("state", {}).get("request_id")


def is_background() -> bool:
    """Whether the task's request is one of a batch, whose answer nobody waits for."""
    scope = REQUEST.get()
    return scope is not None and bool(scope.get("state", {}).get("is_background"))


def session_of(scope: Mapping[str, Any] | None, answered: str = "") -> str | None:
    """The session that the request has opened or was bound to, or that its path names. `answered` is the one that the
    answer names.
    """
    if scope is None:
        return None
    session = scope.get("state", {}).get("session") or answered or scope.get("path_params", {}).get("session_id", "")
    return session if SESSION_ID.fullmatch(session) else None


def session_id() -> str | None:
    """That of the task's request, if it is about one."""
    return session_of(REQUEST.get())


def method_of(scope: Mapping[str, Any]) -> str | None:
    """The request's, if it is a common one; that of a WebSocket is the one that it began with."""
    method = scope.get("method", "GET")
    return method if method in METHODS else None


def route_of(scope: Mapping[str, Any]) -> str | None:
    """The template of the request's path, without what the caller put in it; None where there is no route."""
    route = scope.get("route")
    return None if route is None else route.path


def log_uncaught() -> None:
    """Have it logged from now on, as lines like all others."""
    warnings.showwarning = _log_warning
    sys.excepthook = _log_error
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_threads_error


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """As `warnings.showwarning` is called; `file` and `line` are for texts of another form."""
    logger.warning("%s: %s (%s, line %d)", category.__name__, message, filename, lineno)


def _log_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):  # Ctrl-C is no bug
        sys.__excepthook__(kind, error, trace)
    else:
        logger.critical("an error has ended the process", exc_info=(kind, error, trace))


def _log_unraisable(found: sys.UnraisableHookArgs) -> None:
    logger.error(
        "%s: %r", found.err_msg or "an error could not be raised", found.object, exc_info=found.exc_value or True
    )


def _log_threads_error(found: threading.ExceptHookArgs) -> None:
    if not issubclass(found.exc_type, SystemExit):
        name = "a thread" if found.thread is None else f"the thread {found.thread.name}"
        logger.critical("an error has ended %s", name, exc_info=found.exc_value or True)


LogFormat = Literal["text", "json"]

_CONTROL = (*range(32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
CONTROL = {code: f"\\u{code:04x}" for code in _CONTROL}
"""A line break within a message would be a separate line, with what a client wrote in it. Other characters would move a
terminal's cursor, or turn the direction of what follows.
"""


@dataclass(frozen=True, slots=True)
class Log:
    """What a process logs, in which form, and the replica that it is a part of: several may share a terminal."""

    level: int
    form: LogFormat
    replica: str | None = None


def configure(log: Log) -> None:
    """Log to standard error from now on, also what Python would write there by itself."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(log.replica) if log.form == "json" else TextFormatter(log.replica))
    logging.basicConfig(level=log.level, handlers=[handler])
    log_uncaught()


def configured() -> Log:
    """This process's log, for another process of the same server."""
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler.formatter, TextFormatter):
            form: LogFormat = "json" if isinstance(handler.formatter, JsonFormatter) else "text"
            return Log(root.level, form, handler.formatter.replica)
    return Log(root.level, "text")


class TextFormatter(logging.Formatter):
    """`2027-01-15T08:00:00.123Z INFO djinn: message (request req_1, session "name" …0123abcd)`, and a traceback below.
    That is indented, as an error may have line breaks too. A session without a name has its whole id. Replica `a` is
    `djinn[a]`.
    """

    def __init__(self, replica: str | None = None) -> None:
        super().__init__()
        self.replica = replica

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        about = _about(record)
        if (called := about.pop("session_name", None)) is not None:
            quoted = json.dumps(called, ensure_ascii=False).translate(CONTROL)
            about["session"] = f"{quoted} …{about['session'][-8:]}"
        names = ", ".join(f"{what.removesuffix('_id')} {name}" for what, name in about.items())
        message = record.getMessage().translate(CONTROL)
        program = "djinn" if self.replica is None else f"djinn[{self.replica}]"
        line = f"{_time(record)} {record.levelname} {program}: {message}{f' ({names})' if names else ''}"
        below = self.formatException(record.exc_info).split("\n") if record.exc_info else ()
        return "\n".join([line, *(f"  {each.translate(CONTROL)}" for each in below)])


class JsonFormatter(TextFormatter):
    """An object with `time`, `level`, `logger` and `message`; `replica`, `request_id`, `session` and `session_name`
    where there is one, `traceback` for a bug, and what the line itself has as `fields`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _without_surrogates(record.getMessage()),
            **({} if self.replica is None else {"replica": self.replica}),
            **_about(record),
            **fields,
        }
        if record.exc_info:
            line["traceback"] = _without_surrogates(self.formatException(record.exc_info))
        return orjson.dumps(line).decode().translate(CONTROL)


def _about(record: logging.LogRecord) -> dict[str, str]:
    """The ids of the line's request and session, and the session's name, as far as there are any. A line that no
    request asks for can have its session as `extra`.
    """
    session = getattr(record, "session", None) or session_id()
    named = None if session is None else NAMED.get(session)
    name = None if named is None else _without_surrogates(named.log_name[:MOST_OF_A_NAME])
    ids = {"request_id": request_id(), "session": session, "session_name": name or None}
    return {what: each for what, each in ids.items() if each is not None}


def _without_surrogates(text: str) -> str:
    """The same as JSON can have it: a text of a client's may have lone surrogates."""
    return text.encode(errors="replace").decode()


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
