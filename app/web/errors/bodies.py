"""The JSON text of an error, in the form of the API that the path belongs to."""

import logging
import re
from collections.abc import Mapping
from typing import Any

import orjson

from app.domain.errors import DjinnError, Draining

logger = logging.getLogger(__name__)

BUG_MESSAGE = "internal error; the server's log has the details"
LONG_WORD = re.compile(r"(\S{100})\S+")
LONGEST_TEXT = 1000
"""Characters of an error's message: a client's own input can be in it."""

MESSAGES_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Those of Anthropic's API, which has another error body."""
OVERLOADED = 529
"""What that API answers in place of 503."""
MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}
"""Its words for a status that has words of its own."""


def error_answer(error: DjinnError, scope: Mapping[str, Any]) -> tuple[int, bytes]:
    """The status and the body of the answer to the request of an ASGI `scope`."""
    if scope["path"] not in MESSAGES_PATHS:
        return error.status, error_body(error)
    return _messages_status(error), messages_error_body(error, scope.get("state", {}).get("request_id"))


def error_body(error: DjinnError) -> bytes:
    """The error as JSON, as the OpenAI API has it, and what the error carries beside it."""
    body = error.body()
    return orjson.dumps({**body, "error": {name: value and _clean(value) for name, value in body["error"].items()}})


def messages_error_body(error: DjinnError, request_id: str | None) -> bytes:
    """The error as JSON, as Anthropic's API has it."""
    status = _messages_status(error)
    kind = MESSAGES_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    detail = {"type": kind, "message": _clean(error.message)}
    return orjson.dumps({"type": "error", "error": detail, "request_id": request_id})


def visible_error(error: Exception) -> DjinnError:
    """What a client is told of `error` once its response has begun. Logs an unexpected error."""
    if isinstance(error, DjinnError):
        return error
    logger.error("a streamed answer failed", exc_info=error)
    return DjinnError(BUG_MESSAGE)


def body_of(error: Exception) -> bytes:
    """`error_body` for a response that has begun, whose status cannot tell any more."""
    return error_body(visible_error(error))


def _messages_status(error: DjinnError) -> int:
    return OVERLOADED if error.status == Draining.status else error.status


def _clean(text: str) -> str:
    """Cuts what a client sent at length; its lone surrogates become question marks: UTF-8 has none."""
    return LONG_WORD.sub(r"\1...", text)[:LONGEST_TEXT].encode(errors="replace").decode()
