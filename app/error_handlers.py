"""The one way from an exception to an HTTP answer: every route, known or not, has the same error body."""

from __future__ import annotations

import logging

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from app.errors import (
    Busy,
    DjinnError,
    EngineError,
    FieldOutOfRange,
    MalformedRequest,
    MethodNotAllowed,
    NotFound,
    TooLarge,
    Unauthenticated,
)
from app.sse import ClientDisconnected

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
SHOWN_PROBLEMS = 3
BUG_MESSAGE = "internal error; the server's log has the details"
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that has gone: nobody reads it."""

FROM_STATUS: dict[int, type[DjinnError]] = {
    error.status: error for error in (MalformedRequest, NotFound, MethodNotAllowed, TooLarge)
}
"""What the framework's own exceptions mean here."""


def error_response(error: DjinnError) -> Response:
    """The answer to a request that failed with `error`."""
    headers = {}
    if isinstance(error, Busy):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return Response(error_body(error), error.status, headers, "application/json")


def error_body(error: DjinnError) -> bytes:
    """The JSON text of the error. Lone surrogates from a client's JSON become question marks: UTF-8 has none."""
    body = error.body()
    clean = {name: value and value.encode(errors="replace").decode() for name, value in body["error"].items()}
    return orjson.dumps({"error": clean})


def body_of(error: Exception) -> bytes:
    """`error_body` for a response that has begun, whose status cannot tell any more. Logs an unexpected error."""
    if isinstance(error, DjinnError):
        return error_body(error)
    logger.error("a streamed answer failed", exc_info=error)
    return error_body(DjinnError(BUG_MESSAGE))


def describe_validation(error: RequestValidationError) -> DjinnError:
    """The first problems of a rejected request, each with its field and what the field allows."""
    problems = error.errors()
    if problems[0]["type"] == "json_invalid":
        return MalformedRequest(f"the body is not valid JSON: {problems[0]['ctx']['error']}")
    if problems[0]["loc"] == ("body",) and problems[0]["type"] != "value_error":
        return MalformedRequest("the body must be a JSON object, sent with Content-Type: application/json")
    shown = []
    for problem in problems[:SHOWN_PROBLEMS]:
        field, message = _field(problem["loc"]), problem["msg"].removeprefix("Value error, ")
        shown.append(f"{field}: {message}" if field else message)
    return FieldOutOfRange("; ".join(shown), param=_field(problems[0]["loc"]) or None)


def _field(location: tuple[str | int, ...]) -> str:
    """Dotted path of a field, without the place (`body`, `query`) in front.

    Members of a union are tagged with names of several words, so that they can be left out too.
    """
    return ".".join(str(part) for part in location[1:] if " " not in str(part))


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception with `error_response`."""

    async def on_djinn_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, DjinnError)
        return error_response(error)

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(describe_validation(error))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        meaning = FROM_STATUS.get(error.status_code, EngineError)
        response = error_response(meaning(f"{request.method} {request.url.path}: {error.detail}"))
        response.headers.update(error.headers or {})
        return response

    async def on_bug(request: Request, error: Exception) -> Response:
        response = error_response(DjinnError(BUG_MESSAGE))
        # Answered outside the middleware that sets this header everywhere else.
        response.headers[REQUEST_ID_HEADER] = request.state.request_id
        return response

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientDisconnected, on_disconnect)
    app.add_exception_handler(DjinnError, on_djinn_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_bug)
