"""A line of the log as text, or as JSON for programs."""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from app.logs.about import request_id, session_id
from app.logs.uncaught import log_uncaught

LogFormat = Literal["text", "json"]

CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))}
"""A line break within a message would be a line of its own, with what a client wrote in it."""


def configure(level: int, form: LogFormat) -> None:
    """Log to standard error from now on, also what Python would write there by itself."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler])
    log_uncaught()


def configured() -> tuple[int, LogFormat]:
    """Level and form of this process's log, for another one beside it."""
    root = logging.getLogger()
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
    return root.level, "json" if is_json else "text"


class TextFormatter(logging.Formatter):
    """`2027-01-15T08:00:00.123Z INFO djinn: message (request req_1, session ses_1)`, and a traceback below. That is
    indented, as an error may have line breaks too.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        names = ", ".join(f"{what.removesuffix('_id')} {name}" for what, name in _about(record).items())
        message = record.getMessage().translate(CONTROL)
        line = f"{_time(record)} {record.levelname} djinn: {message}{f' ({names})' if names else ''}"
        below = self.formatException(record.exc_info).split("\n") if record.exc_info else ()
        return "\n".join([line, *(f"  {each.translate(CONTROL)}" for each in below)])


class JsonFormatter(logging.Formatter):
    """An object with `time`, `level`, `logger` and `message`; `request_id` and `session` where there is one,
    `traceback` for a bug, and what the line itself has as `fields`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _without_surrogates(record.getMessage()),
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
