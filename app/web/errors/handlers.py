"""The one way from an exception to an HTTP answer, for every route, known or not."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from app.domain.errors import (
    DjinnError,
    EngineError,
    MalformedRequest,
    MethodNotAllowed,
    NotFound,
    TooLarge,
    Unauthenticated,
)
from app.web.errors.bodies import BUG_MESSAGE, error_answer
from app.web.errors.validation import describe_validation
from app.web.sse import ClientDisconnected

REQUEST_ID_HEADER = "X-Request-Id"
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that has gone."""

METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
"""Those that a route may be for."""

FROM_STATUS: dict[int, type[DjinnError]] = {
    error.status: error for error in (MalformedRequest, NotFound, MethodNotAllowed, TooLarge)
}
"""What the framework's own exceptions mean here."""


def error_response(error: DjinnError, scope: Mapping[str, Any]) -> Response:
    """The answer to the request of an ASGI `scope`, which failed with `error`."""
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    status, body = error_answer(error, scope)
    return Response(body, status, headers, "application/json")


def _allowed_methods(request: Request) -> list[str]:
    """Those that the path has a route for (RFC 9110, 15.5.6). The framework names those of one of its routes."""
    path = {name: request.scope[name] for name in ("type", "path", "root_path", "headers", "query_string")}
    routes = request.app.router.routes

    def is_allowed(method: str) -> bool:
        return any(route.matches({**path, "method": method})[0] is Match.FULL for route in routes)

    return list(filter(is_allowed, METHODS))


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception with `error_response`."""

    async def on_djinn_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, DjinnError)
        return error_response(error, request.scope)

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(describe_validation(request, error), request.scope)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, DjinnError):
            # FastAPI wraps whatever reading a body raises.
            return error_response(error.__cause__, request.scope)
        meaning = FROM_STATUS.get(error.status_code, EngineError)
        reason = f"{error.detail}: {error.__cause__}" if error.__cause__ else error.detail
        hint = "; GET /docs shows all routes" if meaning is NotFound else ""
        response = error_response(meaning(f"{request.method} {request.url.path}: {reason}{hint}"), request.scope)
        response.headers.update(error.headers or {})
        if meaning is MethodNotAllowed:
            response.headers["Allow"] = ", ".join(_allowed_methods(request))
        return response

    async def on_bug(request: Request, error: Exception) -> Response:
        response = error_response(DjinnError(BUG_MESSAGE), request.scope)
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
