"""A line of the log as text, or as JSON for programs."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from app.logs.about import request_id, session_id
from app.logs.uncaught import log_uncaught

LogFormat = Literal["text", "json"]

CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))}
"""A line break within a message would be a line of its own, with what a client wrote in it."""


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
    """This process's log, for another process beside it."""
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler.formatter, TextFormatter | JsonFormatter):
            form: LogFormat = "json" if isinstance(handler.formatter, JsonFormatter) else "text"
            return Log(root.level, form, handler.formatter.replica)
    return Log(root.level, "text")


class TextFormatter(logging.Formatter):
    """`2027-01-15T08:00:00.123Z INFO djinn: message (request req_1, session ses_1)`, and a traceback below. That is
    indented, as an error may have line breaks too. Replica `a` is `djinn[a]`.
    """

    def __init__(self, replica: str | None = None) -> None:
        super().__init__()
        self.replica = replica

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        names = ", ".join(f"{what.removesuffix('_id')} {name}" for what, name in _about(record).items())
        message = record.getMessage().translate(CONTROL)
        program = "djinn" if self.replica is None else f"djinn[{self.replica}]"
        line = f"{_time(record)} {record.levelname} {program}: {message}{f' ({names})' if names else ''}"
        below = self.formatException(record.exc_info).split("\n") if record.exc_info else ()
        return "\n".join([line, *(f"  {each.translate(CONTROL)}" for each in below)])


class JsonFormatter(logging.Formatter):
    """An object with `time`, `level`, `logger` and `message`; `replica`, `request_id` and `session` where there is
    one, `traceback` for a bug, and what the line itself has as `fields`.
    """

    def __init__(self, replica: str | None = None) -> None:
        super().__init__()
        self.replica = replica

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
        return orjson.dumps(line).decode()


def _about(record: logging.LogRecord) -> dict[str, str]:
    """The ids of the line's request and session, as far as there are any. A line that no request asks for can have its
    session as `extra`.
    """
    ids = {"request_id": request_id(), "session": getattr(record, "session", None) or session_id()}
    return {what: name for what, name in ids.items() if name is not None}


def _without_surrogates(text: str) -> str:
    """The same as JSON can have it: a text of a client's may have lone surrogates."""
    return text.encode(errors="replace").decode()


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
