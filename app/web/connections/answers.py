"""Answers that are the last thing on their connection, and that no route has made."""

from http import HTTPStatus

from app.domain.errors import DjinnError
from app.web.errors.bodies import error_body
from app.web.request_id import new_request_id


def last_answer(error: DjinnError, *headers: str) -> bytes:
    """The whole answer, with `headers` besides those that each has."""
    body = error_body(error)
    status = HTTPStatus(error.status)
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: {new_request_id()}",
        "connection: close",
        *headers,
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
