"""The one way from an exception to an HTTP answer, and what a rejected request is told."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from app.domain.errors import (
    ContextTooLong,
    DjinnError,
    Draining,
    EngineError,
    FieldOutOfRange,
    MalformedRequest,
    MethodNotAllowed,
    NotFound,
    ThreadNotFound,
    TooLarge,
    Unauthenticated,
)
from app.domain.text import header_text
from app.logs import CONTROL
from app.web.schema_words import KEY, Schema, allowed, find_field, given, limits_of, schema_of

logger = logging.getLogger(__name__)

BUG_MESSAGE = "internal error; the server's log has the details"
LONG_WORD = re.compile(r"(\S{100})\S+")
MARKS = {code: mark for code, mark in CONTROL.items() if chr(code) not in "\r\n\t"}
LONGEST_TEXT = 1000
"""Characters of an error's message: a client's own input can be in it."""

ANTHROPIC_VERSION = "anthropic-version"
"""The header that each client of Anthropic's API sends."""
MESSAGES = "/v1/messages"
"""What paths begin with that only Anthropic's API has, which has another error body."""
BOTH = ("/v1/models", "/v1/files")
"""Those that OpenAI's has too."""
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
"""Its words for a status that has its own."""


def is_of_anthropic(scope: Mapping[str, Any]) -> bool:
    """Whether the request of an ASGI `scope` is one of Anthropic's API: by its path, or by its header."""
    path: str = scope["path"]
    if path.startswith(BOTH):
        return ANTHROPIC_VERSION.encode() in dict(scope.get("headers", ()))
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def error_answer(error: DjinnError, scope: Mapping[str, Any]) -> tuple[int, bytes]:
    """The status and the body of the answer to the request of an ASGI `scope`."""
    if not is_of_anthropic(scope):
        return error.status, error_body(error)
    return _messages_status(error), messages_error_body(error, scope.get("state", {}).get("request_id"))


def error_body(error: DjinnError) -> bytes:
    """The error as JSON, as the OpenAI API has it, and what else the error carries."""
    body = error.body()
    return orjson.dumps({**body, "error": {name: value and clean(value) for name, value in body["error"].items()}})


def messages_error_body(error: DjinnError, request_id: str | None) -> bytes:
    """The error as JSON, as Anthropic's API has it."""
    status = _messages_status(error)
    kind = MESSAGES_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = _context_words(error) if isinstance(error, ContextTooLong) else error.message
    detail: dict[str, Any] = {"type": kind, "message": clean(message)}
    if isinstance(error, ThreadNotFound):
        detail["details"] = {"error_code": error.code}  # by which SDKs know what to do
    return orjson.dumps({"type": "error", "error": detail, "request_id": request_id})


def _context_words(error: ContextTooLong) -> str:
    """What Anthropic's API says of a context that is too long. Agents read the numbers and try again with less."""
    if error.context is None:
        return error.message
    if error.prompt > error.context:
        return f"prompt is too long: {error.prompt} tokens > {error.context} maximum"
    sizes = f"{error.prompt} + {error.wanted} > {error.context}"
    return f"input length and `max_tokens` exceed context limit: {sizes}, decrease input length or `max_tokens`"


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


def clean(text: str) -> str:
    """Cuts what a client sent at length; its lone surrogates become question marks: UTF-8 has none. What would turn the
    direction of a text, or move a terminal's cursor, is shown as the log shows it.
    """
    return LONG_WORD.sub(r"\1...", text)[:LONGEST_TEXT].encode(errors="replace").decode().translate(MARKS)


Problem = dict[str, Any]
"""An error as pydantic describes it."""

OWN_WORDS = frozenset({"value_error", "role", "prompt", "kind", "item", "tool_choice"})
"""Types whose message the models here wrote themselves."""
TOLD_APART_BY = {"kind": "type", "item": "type", "role": "role"}
"""By such a type, the field of a value whose text the models here do not know."""
WORDS: dict[str, Callable[[Problem], str]] = {
    "missing": lambda problem: "required",
    "extra_forbidden": lambda problem: "unknown field",
    "unexpected_keyword_argument": lambda problem: "unknown field",
    "string_unicode": lambda problem: "a string in Unicode; got half of a surrogate pair",
    "bytes_invalid_encoding": lambda problem: f"a string in base64; got {given(problem['input'])}",
    "byte_size": lambda problem: f"a size such as 2GiB; got {given(problem['input'])}",
    "byte_size_unit": lambda problem: f"a size such as 2GiB; got {given(problem['input'])}",
    "json_invalid": lambda problem: "invalid JSON",
}
"""By type. Of any other, the field's schema says what is allowed."""


def _describe(root: Schema, problem: Problem, location: Sequence[str | int]) -> tuple[str, str]:
    """The field at `location` of a value that `root` describes, and what is wrong with it."""
    kind = problem["type"]
    field, schemas = find_field(root, location)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        # No schema has a name for it.
        return ".".join(filter(None, (field, str(location[-1])))), WORDS[kind](problem)
    if kind in OWN_WORDS:
        words = problem["msg"].removeprefix("Value error, ")
        name, value = TOLD_APART_BY.get(kind), problem["input"]
        has_name = isinstance(value, dict) and name in value
        return field, f"{words}; got the {name} {given(value[name])}" if has_name else words
    if kind in WORDS:
        return field, WORDS[kind](problem)
    if limits := limits_of(problem.get("ctx", {})):
        schemas = [{"type": "number", **limits, **schema} for schema in schemas or [{}]]
    if kind in ("too_short", "too_long"):  # not those members of a union that take a list of any length
        sizes = {"minItems", "maxItems"}
        schemas = [each for each in schemas if each.get("type") != "array" or sizes & each.keys()] or schemas
    whose = "its name: " if KEY in problem["loc"][-1:] else ""
    came = problem["input"]
    if problem["loc"][:1] == ("header",) and isinstance(came, str):
        came = header_text(came)
    return field, f"{whose}{allowed(schemas)}; got {given(came)}"


Body = TypeVar("Body", bound=BaseModel)
SHOWN_PROBLEMS = 3
ELSEWHERE = {"query": " in the query string", "header": " as a header"}
"""Where a missing field belongs, if not in the body."""


def describe_validation(request: Request, error: RequestValidationError) -> DjinnError:
    """The first problems of a rejected request."""
    problems = error.errors()
    first = problems[0]
    if first["loc"] == ("body",) and first["type"] == "string_unicode":
        return FieldOutOfRange("the body has a field whose name is not Unicode: half of a surrogate pair")
    if first["loc"] == ("body",) and first["type"] != "value_error":
        return MalformedRequest("the body must be a JSON object, sent with Content-Type: application/json")
    told = []
    for problem in problems[:SHOWN_PROBLEMS]:
        place, *location = problem["loc"]
        field, words = _describe(_schema(request, place), problem, location)
        told.append((field, words + (ELSEWHERE.get(place, "") if problem["type"] == "missing" else "")))
    return _refusal(told)


def read_body(model: type[Body], fields: Mapping[str, Any]) -> Body:
    """A body that came by another way than a request. Raises `FieldOutOfRange` with its first problems."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _refusal(islice(described(model, error), SHOWN_PROBLEMS)) from error


def described(model: type[BaseModel], error: ValidationError) -> Iterator[tuple[str, str]]:
    """Each field of the model that has a problem, and what is wrong with it."""
    return (_describe(schema_of(model), dict(problem), problem["loc"]) for problem in error.errors())


def _refusal(problems: Iterable[tuple[str, str]]) -> DjinnError:
    described = list(problems)
    # Both forms that a field may have can say the same.
    sentences = dict.fromkeys(f"{field}: {words}" if field else words for field, words in described)
    return FieldOutOfRange("; ".join(sentences), param=described[0][0] or None)


def _schema(request: Request, place: str) -> Schema:
    """That of the whole body or query, or of all headers that the route reads."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    if place == "header":
        types = {field.alias: Annotated[field.annotation, *field.metadata] for field in _headers(route.dependant)}
        return {"properties": {str(name): schema_of(each) for name, each in types.items()}}
    field = route.body_field if place == "body" else route.dependant.query_params[0]
    assert field is not None
    model: Any = field.field_info.annotation
    return schema_of(model)


def _headers(dependant: Dependant) -> Iterator[FieldInfo]:
    yield from (field.field_info for field in dependant.header_params)
    for each in dependant.dependencies:
        yield from _headers(each)


REQUEST_ID_HEADER = "X-Request-Id"
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that has gone."""

TRY_AGAIN_LATER = 1013
"""The code with which a WebSocket is closed (RFC 6455, 7.4.1)."""
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
"""Those that a route may be for."""

FROM_STATUS: dict[int, type[DjinnError]] = {
    error.status: error for error in (MalformedRequest, NotFound, MethodNotAllowed, TooLarge)
}
"""What the framework's own exceptions mean here."""


def known_error(error: Exception, scope: Mapping[str, Any]) -> DjinnError:
    """What the client is told of an exception of the framework, or of whoever reads its body."""
    if isinstance(error, DjinnError):
        return error
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, DjinnError):
        return error.__cause__  # FastAPI wraps whatever reading a body raises
    meaning = FROM_STATUS.get(error.status_code, EngineError)
    reason = f"{error.detail}: {error.__cause__}" if error.__cause__ else error.detail
    hint = "; GET /docs shows all routes" if meaning is NotFound else ""
    return meaning(f"{scope['method']} {scope['path']}: {reason}{hint}")


def error_response(error: DjinnError, scope: Mapping[str, Any]) -> Response:
    """The answer to the request of an ASGI `scope`, which failed with `error`."""
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    status, body = error_answer(error, scope)
    return Response(body, status, headers, "application/json")


async def end_with(error: DjinnError, scope: Scope, receive: Receive, send: Send, *, has_begun: bool) -> None:
    """Answer the request with the error. An answer that `has_begun` is cut off, so that no client takes it for whole,
    and a WebSocket closed, so that its client comes again.
    """
    if not has_begun:
        await error_response(error, scope)(scope, receive, send)
    elif scope["type"] == "websocket":
        await close_socket(send, TRY_AGAIN_LATER, error.message)
    elif (cut := scope["state"].get("cut")) is not None:  # else the answer that lacks its end is one
        logger.warning("an answer is cut off: %s", error.message)
        cut()


def closable(code: int | None) -> int:
    """A code that may be sent (RFC 6455, 7.4). Some codes only describe a connection that ended without one."""
    return code if code is not None and code not in (1005, 1006, 1015) and 1000 <= code < 5000 else 1000


async def close_socket(send: Send, code: int, reason: str) -> None:
    """Close a client's WebSocket, if that is still there."""
    cut = clean(reason).encode()[:123].decode(errors="ignore")  # RFC 6455, 5.5
    with suppress(RuntimeError):  # the client has gone already
        await send({"type": "websocket.close", "code": closable(code), "reason": cut})


def _allowed_methods(request: Request) -> list[str]:
    """Those that the path has a route for (RFC 9110, 15.5.6). The framework names those of one of its routes."""
    path = {name: request.scope[name] for name in ("type", "path", "root_path", "headers", "query_string")}
    routes = request.app.router.routes

    def is_allowed(method: str) -> bool:
        return any(route.matches({**path, "method": method})[0] is Match.FULL for route in routes)

    return list(filter(is_allowed, METHODS))


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception with `error_response`."""

    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            error = describe_validation(request, error)
        known = known_error(error, request.scope)
        response = error_response(known, request.scope)
        if isinstance(error, HTTPException):
            response.headers.update(error.headers or {})
        if isinstance(known, MethodNotAllowed):
            response.headers["Allow"] = ", ".join(_allowed_methods(request))
        return response

    async def on_bug(request: Request, error: Exception) -> Response:
        response = error_response(DjinnError(BUG_MESSAGE), request.scope)
        # Answered outside the middleware that sets this header everywhere else.
        response.headers[REQUEST_ID_HEADER] = request.state.request_id
        return response

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientDisconnect, on_disconnect)
    for kind in (DjinnError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(Exception, on_bug)
